"""The cause of a difference between replicas: options, other writes, or passes that differ. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from moeverify.results.guard import DriftCause
from moeverify.scripts.guard.lines import StepRecord, exchange_activations
from moeverify.scripts.record.lines import Options

_SMALL = 16  # elements of a loss or a norm
_SAME = 1e-5  # relative, of losses and largest outputs of equal computations


def find_cause(
    name: str,
    members: Mapping[int, int],
    records: Mapping[int, StepRecord],
    gradients: str,
    shared: Collection[str],
    *,
    right: Collection[str] = (),
    parts: Collection[str] = (),
    share: tuple[int, int] | None = None,
    summed: Collection[tuple[int, ...]] = (),
) -> DriftCause | None:
    """Return why replicas of a tensor differ after a step, or None if it is not known.

    `members` has the tensor's number by rank, and `gradients` compares their gradients (see `DriftFacts`).
    `shared` are the modules whose weights are equal on these ranks and that compute all positions, and `right`
    those of them where the gradients of random weights are equal. `parts` are modules with other random
    weights on each rank: with any, the ranks are not data-parallel. `share` is the one of `find_share`, and
    `summed` are groups of ranks that add up activations.
    """
    known = {rank: number for rank, number in members.items() if rank in records}
    if gradients == "equal":
        return _find_options(name, known, records) or _find_writers(known, records)
    if gradients != "differ" or not (parts or exchange_activations(tuple(known), records)):
        return None
    for group in summed:
        if set(group) <= known.keys() and len({records[rank].rows for rank in group}) > 1:
            return DriftCause(kind="rows", ranks=group)
    rows = [records[rank].rows for rank in known]
    losses = [records[rank].losses for rank in known]
    if not rows[0] or any(each != rows[0] for each in rows) or not all(losses):
        return None
    if share is not None:
        is_lost = not all(_are_close(losses[0], each) for each in losses)
        module = name.rpartition(".")[0]
        return DriftCause(kind="sequence", module=module, counts=share, is_ambiguous=is_lost)
    return _compare_passes(name, known, records, shared, right, parts)


def find_source(members: Mapping[int, int], records: Mapping[int, StepRecord]) -> int | None:
    """Return the rank whose values replace those of all other ranks after a step, or None.

    The ranks have updated the tensor differently, and exchange no message and no sum of their gradients.
    `members` is the one of `find_cause`.
    """
    ended = {records[rank].ended[number] for rank, number in members.items()}
    stepped = {rank: records[rank].stepped[number] for rank, number in members.items()}
    sources = [rank for rank, bits in stepped.items() if ended == {bits}]
    if len(sources) != 1 or not all(stepped.values()) or len(stepped) < 2:
        return None
    groups = [group for rank in members for group in records[rank].groups]
    is_reduced = any(group.is_message or group.largest_sum > _SMALL for group in groups)
    return None if is_reduced or not all(records[rank].is_traced for rank in members) else sources[0]


def _compare_passes(
    name: str,
    members: Mapping[int, int],
    records: Mapping[int, StepRecord],
    shared: Collection[str],
    right: Collection[str],
    parts: Collection[str],
) -> DriftCause:
    """Return why gradients differ on ranks with equal rows, from losses and outputs; see `find_cause`."""
    losses = [records[rank].losses for rank in members]
    unequal = _find_modules(members, records, shared)
    first = unequal[0] if unequal else ""
    if not all(_are_close(losses[0], each) for each in losses):
        return DriftCause(kind="forward", module=first)
    own, earlier = _find_earlier(name, records[min(members)])
    if own in unequal:
        return DriftCause(kind="local", module=first)
    has_copies = own in parts or (not unequal and any(each in right for each in earlier))
    return DriftCause(kind="parts" if has_copies else "backward", module=own)


def _find_earlier(name: str, record: StepRecord) -> tuple[str, list[str]]:
    """Return the module of a parameter, and those with outputs before it; no others if it has none."""
    own, modules = name.rpartition(".")[0], list(dict.fromkeys(module for module, _ in record.outputs))
    return own, modules[: modules.index(own)] if own in modules else []


def _find_options(
    name: str, members: Mapping[int, int], records: Mapping[int, StepRecord]
) -> DriftCause | None:
    """Return the first option that the tensor's optimizers do not share."""
    by_rank = {rank: _find_group(name, records[rank].options) for rank in members}
    first, *others = by_rank
    for rank in others:
        one, two = by_rank[first], by_rank[rank]
        if one is None or two is None:
            continue
        for option in sorted(one.options.keys() & two.options.keys()):
            values = one.options[option], two.options[option]
            if values[0] != values[1]:
                site = two.sites.get(option, "")
                cause = DriftCause(
                    kind="option", option=option, values=values, ranks=(first, rank), site=site
                )
                return _compare_schedules(cause, records)
    return None


def _compare_schedules(cause: DriftCause, records: Mapping[int, StepRecord]) -> DriftCause:
    """Return the cause with the numbers of scheduler steps on its ranks, if these differ."""
    one, two = (
        [call for call in records[rank].calls if call.name == "scheduler step"] for rank in cause.ranks
    )
    if len(one) == len(two):
        return cause
    changes = {"kind": "schedule", "counts": (len(one), len(two)), "site": (one or two)[0].site}
    return cause.model_copy(update=changes)


def _find_group(name: str, options: Sequence[Options]) -> Options | None:
    return next((group for group in options if name in group.names), None)


def _find_writers(members: Mapping[int, int], records: Mapping[int, StepRecord]) -> DriftCause | None:
    """Return the ranks where something else than the optimizer's step has changed the tensor."""
    ranks = tuple(rank for rank, number in members.items() if number in records[rank].written)
    return DriftCause(kind="write", ranks=ranks) if ranks else None


def _find_modules(
    members: Mapping[int, int], records: Mapping[int, StepRecord], shared: Collection[str]
) -> list[str]:
    """Return those of these modules with another largest output on one of the ranks, in order of the calls."""
    outputs = [[each for each in records[rank].outputs if each[0] in shared] for rank in members]
    found: dict[str, None] = {}
    for together in zip(*outputs, strict=False):
        if len({each for each, _ in together}) > 1:
            break
        first, *others = (value for _, value in together)
        if not all(_are_close((first,), (other,)) for other in others):
            found[together[0][0]] = None
    return list(found)


def _are_close(first: Sequence[float], second: Sequence[float]) -> bool:
    return len(first) == len(second) and all(
        abs(one - two) <= _SAME * max(abs(one), abs(two)) for one, two in zip(first, second, strict=True)
    )
