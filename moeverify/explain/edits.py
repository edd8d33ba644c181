"""Edits: executable changes of the ranks' operators that make them follow the single device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.chains import is_of_masks, list_ancestors, list_group
from moeverify.explain.compare import is_right
from moeverify.explain.content import is_move
from moeverify.explain.counterparts import Counterparts, OneDevice, Pair, Place, find_pair, pair_tensors
from moeverify.explain.cuts import Cut, list_batch_cuts, list_cuts, take
from moeverify.explain.edit import Edit, Kind
from moeverify.explain.joint import At, Changes
from moeverify.explain.operators import execute_all
from moeverify.explain.part_edits import list_part_edits
from moeverify.explain.program import OVERWRITING, SETUP, Op, Ref, list_refs


def list_edits(
    alignment: Alignment, one: OneDevice, counterparts: Counterparts, ops: Sequence[At]
) -> Iterator[Edit]:
    """Yield edits that make the operators at one place of the program compute as on the single device."""
    yield from list_part_edits(alignment, one, ops)
    for pairs in counterparts.list_pairs(ops):
        yield from _list_towards(alignment, one, pairs)


def _list_towards(alignment: Alignment, one: OneDevice, pairs: Sequence[tuple[At, Op]]) -> Iterator[Edit]:
    """Yield edits that turn operators into their counterparts."""
    joint = alignment.joint
    first, other = pairs[0]
    op = joint.op(first)
    if op.meeting is None and op.short == other.short:
        if op.name == other.name and any(_options(joint.op(at)) != _options(each) for at, each in pairs):
            yield _make("number", pairs, lambda at, each: _with_options(joint.op(at), each))
        for pair in pair_tensors(op, other):
            yield from _list_operands(alignment, one, pairs, pair.place)
    elif (
        op.meeting is None
        and len(list(op.refs())) == len(list(other.refs()))
        and not (is_move(op) or is_move(other))
    ):
        yield _make("operator", pairs, lambda at, each: _with_operator(joint.op(at), each))
    changes = Changes()
    for at, each in pairs:
        data = _find_result(alignment, one, at, each)
        if data is None:
            return
        changes.values[at[0], joint.op(at).results[0]] = data
    yield Edit("value", tuple(at for at, _ in pairs), changes, dict(pairs))


def _make(kind: Kind, pairs: Sequence[tuple[At, Op]], build: Callable[[At, Op], Op]) -> Edit:
    changes = Changes()
    for at, other in pairs:
        changes.ops[at] = _execute(build(at, other))
    return Edit(kind, tuple(at for at, _ in pairs), changes, dict(pairs))


def _execute(op: Op) -> Callable[[Callable[[int], Tensor]], list[Tensor]]:
    return lambda lookup: execute_all(op.name, op.args, op.kwargs, op.written, lookup)


def _list_operands(
    alignment: Alignment, one: OneDevice, pairs: Sequence[tuple[At, Op]], place: Place
) -> Iterator[Edit]:
    """Yield edits that replace the operand at a place, for all operators that take this value."""
    found: dict[Kind, list[list[tuple[At, Tensor]]]] = {"operand": [], "whole": []}
    for at, other in pairs:
        pair = find_pair(alignment.joint.op(at), other, place)
        if pair is None:
            return
        mine = (at[0], pair.mine)
        whole = one.data(pair.theirs)
        found["operand"].append(
            [(mine, data) for data in find_operands(alignment, one, at, other, pair, whole)]
        )
        found["whole"].append([(mine, data) for data in _find_wholes(alignment, one, at, pair)])
    first = pairs[0][0]
    ranks = {each[0] for each in alignment.siblings((first[0], alignment.joint.op(first).results[0]))}
    if ranks != {at[0] for at, _ in pairs}:
        found["whole"] = []  # parts of a sum: all ranks must be edited together
    for kind, alternatives in found.items():
        for chosen in zip(*alternatives, strict=False):
            if any(_is_other(alignment.data(at), data) for at, data in chosen):
                yield Edit(
                    kind, tuple(at for at, _ in pairs), Changes(values=dict(chosen)), dict(pairs), place
                )


def _is_other(actual: Tensor | None, data: Tensor) -> bool:
    return actual is None or actual.shape != data.shape or not is_right(actual, data)


def find_operands(
    alignment: Alignment, one: OneDevice, at: At, other: Op, pair: Pair, whole: Tensor | None
) -> list[Tensor]:
    """Return candidates for the right operand of a rank as parts of `whole`, in its shape, the likeliest first."""
    mine = alignment.joint.value((at[0], pair.mine))
    known = alignment.find((at[0], pair.mine))
    is_right_here = alignment.is_right((at[0], pair.mine))
    tells = alignment.tells((at[0], pair.mine)) and not is_of_masks(alignment.joint, (at[0], pair.mine))
    if whole is None or (tells and (known is None or known.ids is None or not is_right_here)):
        return []  # an earlier operator may have made it wrong
    ids = None if known is None or known.over else known.ids
    found = [None if ids is None else _same_rows(one, pair.theirs, whole, ids)]
    found.append(_beside(alignment, one, at, other, pair, whole))
    found.append(take(whole, mine.shape, list_all_cuts(alignment, one, at, other)))
    found.append(None if ids is None else _same_places(one, whole, ids))
    return [each.to(whole.dtype) for each in found if each is not None]


def list_all_cuts(alignment: Alignment, one: OneDevice, at: At, other: Op) -> list[Cut]:
    """Return the indices along each dimension that a rank holds of the operands and of the batch."""
    op, joint = alignment.joint.op(at), alignment.joint
    cuts = list(
        list_batch_cuts(one.program, joint.programs[at[0]], alignment.occurrence((at[0], op.results[0])))
    )
    for pair in pair_tensors(op, other):
        known = alignment.find((at[0], pair.mine))
        if known is not None and known.ids is not None and not known.over:
            places = _find_places(one, pair.theirs, known.ids)
            if places is not None:
                cuts += list_cuts(places, one.program.values[pair.theirs].shape)
    return cuts


def _find_wholes(alignment: Alignment, one: OneDevice, at: At, pair: Pair) -> list[Tensor]:
    """Return the whole tensor if a rank takes a part of it, as a list of at most one."""
    whole, known = one.data(pair.theirs), alignment.find((at[0], pair.mine))
    if whole is None or known is None or known.ids is None or not one.holds(pair.theirs, known.ids):
        return []
    return [whole]


def _same_rows(one: OneDevice, value: int, whole: Tensor, ids: Tensor) -> Tensor | None:
    """Return the whole rows of a tensor that contain the rank's rows, which may lack some elements."""
    own = one.ids(value)
    if own is None or not own.numel() or ids.ndim < 2 or own.ndim < 2 or ids.shape[-1] != own.shape[-1]:
        return None
    places = one.find_places(value, ids)
    rows = torch.where(places >= 0, places // own.shape[-1], -1).reshape(-1, ids.shape[-1])
    found = rows.amax(1)
    if bool((found < 0).any()) or bool(((rows != found[:, None]) & (rows >= 0)).any()):
        return None
    return whole.reshape(-1, own.shape[-1])[found].reshape(ids.shape)


def _same_places(one: OneDevice, whole: Tensor, ids: Tensor) -> Tensor | None:
    """Return the elements of `whole` at the indices that `ids` have in their own tensor of the same size."""
    roots = one.roots(ids)
    source = one.ids(roots[0]) if len(roots) == 1 else None
    if source is None or source.numel() != whole.numel():
        return None
    index = (ids - int(source.reshape(-1)[0])).clamp(min=0)
    return torch.where(ids > 0, whole.reshape(-1)[index], 0.0)


def _beside(
    alignment: Alignment, one: OneDevice, at: At, other: Op, pair: Pair, whole: Tensor
) -> Tensor | None:
    """Return the elements of the single device's operand that broadcast with another operand of the rank."""
    op = alignment.joint.op(at)
    wanted = alignment.joint.value((at[0], pair.mine)).shape
    for each in pair_tensors(op, other):
        known = alignment.find((at[0], each.mine))
        if each.place == pair.place or known is None or known.ids is None or known.over:
            continue
        positions = _positions(one, each.theirs, known.ids)
        found = None if positions is None else _broadcast_pick(one, each.theirs, whole, positions)
        if found is not None and found.numel() == int(torch.Size(wanted).numel()):
            return found.reshape(wanted)
    return None


def _positions(one: OneDevice, value: int, ids: Tensor) -> Tensor | None:
    """Return the flat index of each element in a single-device value; None if any is missing or padding."""
    places = _find_places(one, value, ids)
    return None if places is None or bool((places < 0).any()) else places


def _find_places(one: OneDevice, value: int, ids: Tensor) -> Tensor | None:
    """Return the flat index of each element in a single-device value, -1 for padding.

    None if an element is missing.
    """
    places = one.find_places(value, ids)
    return places if bool(((places >= 0) | (ids == 0)).all()) else None


def _broadcast_pick(one: OneDevice, value: int, data: Tensor | None, positions: Tensor) -> Tensor | None:
    """Return a tensor's elements at positions of a value, after broadcasting it to the value's shape."""
    shape = one.program.values[value].shape
    try:
        return None if data is None else data.expand(shape).reshape(-1)[positions]
    except RuntimeError:
        return None


def _find_result(alignment: Alignment, one: OneDevice, at: At, other: Op) -> Tensor | None:
    """Return the right result of an operator on a rank, taken from the result of its counterpart.

    It is the part selected by the rank's operands or its share of the batch. None if no part has the right
    shape.
    """
    op = alignment.joint.op(at)
    if not other.results or not op.results:
        return None
    right = one.program.values[other.results[0]]
    actual = alignment.joint.value((at[0], op.results[0])).shape
    if right.data is None:
        return None
    part = take(right.data, actual, list_all_cuts(alignment, one, at, other))
    if part is not None:
        return part
    for pair in pair_tensors(op, other):
        known = alignment.find((at[0], pair.mine))
        if known is None or known.ids is None or known.over:
            continue
        positions = _positions(one, pair.theirs, known.ids)
        if positions is None:
            continue
        shape = one.program.values[pair.theirs].shape
        if right.shape == shape and tuple(positions.shape) == actual:
            return right.data.reshape(-1)[positions]
        rows = _pick_rows(shape, right.data, positions, actual)
        if rows is not None:
            return rows
    return None


def _pick_rows(
    shape: tuple[int, ...], data: Tensor, positions: Tensor, wanted: tuple[int, ...]
) -> Tensor | None:
    """Return the rows of a result that belong to an operand's rows, for operators that compute row by row."""
    if not shape or not wanted or not positions.numel() or not positions.ndim or data.ndim < 1:
        return None
    rows = (positions.reshape(-1, positions.shape[-1]) // shape[-1])[:, 0]
    num_rows = data.numel() // data.shape[-1]
    if num_rows != int(torch.Size(shape).numel()) // shape[-1] or wanted[-1] != data.shape[-1]:
        return None
    found = data.reshape(num_rows, -1)[rows]
    return found.reshape(wanted) if found.numel() == int(torch.Size(wanted).numel()) else None


def list_chain_numbers(alignment: Alignment, one: OneDevice, op: At) -> Iterator[Edit]:
    """Yield edits that give an operator the numbers of the same line on the single device.

    For operators that compute masks and indices, whose results are not distinguishable by their values.
    """
    joint = alignment.joint
    recorded = joint.op(op)
    if (
        not recorded.results
        or not list(recorded.reads())
        or joint.value((op[0], recorded.results[0])).alias >= 0
    ):
        return  # sizes of new tensors and views depend on the rank's part
    pairs: list[tuple[At, Op]] = []
    for at in list_group(alignment, op):
        own, program = joint.op(at), joint.programs[at[0]]
        occurrence = alignment.occurrence((at[0], own.results[0]))
        other = one.find_on_line(program, own, occurrence) if program.sites_of(own) else None
        if other is None:
            return
        pairs.append((at, other))
    if any(_options(joint.op(at)) != _options(each) for at, each in pairs):
        yield _make("number", pairs, lambda at, each: _with_options(joint.op(at), each))


def list_removals(alignment: Alignment, ops: Sequence[At], depth: int = 0) -> Iterator[Edit]:
    """Yield edits that remove an operator: one of its operands replaces its result.

    With `depth` > 0, also try values that an operand was moved from, of any shape.
    """
    joint = alignment.joint
    results = joint.op(ops[0]).results
    if not results or alignment.is_on_one_device((ops[0][0], results[0])):
        return  # the single device does this too
    lists = {at: list(list_ancestors(joint, at, depth)) for at in ops}
    count = min(len(each) for each in lists.values())
    result = joint.value((ops[0][0], results[0]))
    for place in range(count):
        operand = joint.value(lists[ops[0]][place])
        is_cast = joint.op(ops[0]).short.strip("_") == "to_copy"
        if depth or (operand.shape == result.shape and (is_cast or operand.dtype == result.dtype)):
            changes = Changes()
            for at in ops:
                changes.ops[at] = _pass(lists[at][place][1], len(joint.op(at).results))
            yield Edit("removed", tuple(ops), changes, {}, (place,))


def list_skipped_writes(
    alignment: Alignment, unknown: Sequence[At], *, trusts: bool = False
) -> Iterator[Edit]:
    """Yield edits that leave out the writes of one call stack to a tensor that was right before.

    With `trusts`, the values before are known to be right.

    Such writes belong to passes which one device does not run, such as a validation or a warm-up. Another call
    made the tensor. Code that overwrites a tensor before the first step initializes it: the written value is
    wrong, and the write is not.
    """
    joint = alignment.joint
    groups: dict[tuple[object, ...], list[At]] = {}
    for at in unknown:
        op = joint.op(at)
        is_initial = op.step == SETUP and not op.module and op.short.rstrip("_") in OVERWRITING
        if op.meeting is None and op.sites and len(op.results) == 1 and op.written == (0,) and not is_initial:
            groups.setdefault((op.name, op.module, op.sites), []).append(at)
    for ops in reversed(groups.values()):  # without an earlier write, a later one may change nothing
        before = {at: next(list_refs(joint.op(at).args)) for at in ops}
        first = {at[0]: (at[0], before[at]) for at in reversed(ops)}.values()
        callers = joint.op(ops[0]).sites[1:]
        is_older = all(joint.op(joint.maker(each)).sites[1:] != callers for each in first)
        if is_older and (trusts or not any(map(alignment.is_wrong, first))):
            changes = Changes(ops={at: _pass(before[at], 1) for at in ops})
            yield Edit("removed", tuple(ops), changes)


def list_numbers(alignment: Alignment, ops: Sequence[At], numbers: Sequence[float]) -> Iterator[Edit]:
    """Yield edits that replace a number of an operator by other numbers of the same function."""
    joint = alignment.joint
    op = joint.op(ops[0])
    if not op.results or joint.value((ops[0][0], op.results[0])).alias >= 0:
        return  # sizes of views cannot be wrong: the recorded shapes would not fit
    for place, mine in enumerate(op.args):
        if isinstance(mine, bool) or not isinstance(mine, int | float):
            continue
        for number in numbers:
            if number != mine and (isinstance(mine, float) or float(number).is_integer()):
                changes = Changes()
                value = type(mine)(number)
                for at in ops:
                    changes.ops[at] = _execute(_with_argument(joint.op(at), place, value))
                yield Edit("number", tuple(ops), changes, {}, (place,), ((str(mine), str(value)),))


def _with_argument(op: Op, place: int, value: Any) -> Op:
    return replace(op, args=(*op.args[:place], value, *op.args[place + 1 :]))


def _pass(number: int, count: int) -> Callable[[Callable[[int], Tensor]], list[Tensor]]:
    return lambda lookup: [lookup(number)] * count


def _options(op: Op) -> tuple[Any, ...]:
    """Return the non-tensor arguments of an operator."""

    def strip(value: Any) -> Any:
        if isinstance(value, Ref):
            return None
        if isinstance(value, list | tuple):
            return tuple(strip(each) for each in value)
        return value

    return tuple(strip(each) for each in op.args), tuple(
        sorted((k, str(strip(v))) for k, v in op.kwargs.items())
    )


def _with_options(op: Op, other: Op) -> Op:
    """Return an operator with the numbers and options of another call."""

    def merge(mine: Any, theirs: Any) -> Any:
        if isinstance(mine, Ref):
            return mine
        if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple) and len(mine) == len(theirs):
            return type(mine)(merge(one, two) for one, two in zip(mine, theirs, strict=True))
        is_tensor = next(list_refs(theirs), None) is not None  # of the other program, also in a longer list
        return mine if is_tensor else theirs

    args = [merge(mine, theirs) for mine, theirs in zip(op.args, other.args, strict=False)]
    return replace(op, args=tuple(args), kwargs={**op.kwargs, **_plain(other)})


def _plain(op: Op) -> dict[str, Any]:
    return {name: value for name, value in op.kwargs.items() if not isinstance(value, Ref | list | tuple)}


def _with_operator(op: Op, other: Op) -> Op:
    """Return `other` with the operands of `op`."""
    numbers = iter(list(op.refs()))

    def fill(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(next(numbers))
        if isinstance(value, list | tuple):
            return type(value)(fill(each) for each in value)
        return value

    args = tuple(fill(each) for each in other.args)
    named = {name: fill(value) for name, value in other.kwargs.items()}
    return replace(op, name=other.name, args=args, kwargs=named, written=other.written)
