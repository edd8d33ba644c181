"""Names the causes of what is not a gradient: initial values, forward passes, losses, norms, updates, state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from moeverify.diagnose.cause import Cause
from moeverify.diagnose.evidence import EXACT, Suspect
from moeverify.diagnose.gradient import Named, merge_named
from moeverify.diagnose.place import Origin
from moeverify.diagnose.places import examine_places, match_slices
from moeverify.diagnose.replicas import Coordinates, examine_replica_sums
from moeverify.diagnose.rounding import examine_rounding
from moeverify.diagnose.tap import FORWARD
from moeverify.diagnose.verdict import Verdict, list_ranks, name_factor

ByKind = Mapping[str, Sequence[Suspect]]


def find_scale(suspect: Suspect) -> float | None:
    """Return k if the tensor is k times its golden to float64's precision, else None."""
    expected, actual = suspect.expected.reshape(-1), suspect.whole().reshape(-1)
    square = float(torch.dot(expected, expected))
    if square == 0.0:
        return None
    factor = float(torch.dot(expected, actual)) / square
    error = float((actual - factor * expected).norm()) / max(float(actual.norm()), 1e-300)
    return factor if error < EXACT else None


def name_initial(suspects: Sequence[Suspect]) -> list[Named]:
    """Return the causes of wrong initial values."""
    named: list[Named] = []
    for suspect in suspects:
        verdict = examine_places(suspect) or examine_rounding(suspect) or _zero(suspect)
        if verdict is None:
            verdict = _odd_replica(suspect)
        named.append(Named((suspect,), verdict))
    return named


def _zero(suspect: Suspect) -> Verdict | None:
    if float(suspect.whole().abs().max()) == 0.0:
        return Verdict(Cause.DETACHED, "the initial values are all zero: nothing was filled in")
    return None


def _odd_replica(suspect: Suspect) -> Verdict:
    """Return which ranks have initial values of their own; two equal parts are copies of each other."""
    copies = _equal_parts(suspect)
    if copies:
        return Verdict(Cause.DUPLICATE, f"parts that should differ hold the same values: {copies}", "init")
    wrong = [
        piece.rank
        for piece in suspect.pieces
        if piece.local is not None
        and not torch.equal(piece.local.to(torch.float64), piece.region.take(suspect.expected))
    ]
    sentence = f"{list_ranks(wrong)} started from other values than the seed and the name give"
    return Verdict(Cause.REPLICAS, sentence, list_ranks(wrong))


def _equal_parts(suspect: Suspect) -> str:
    seen: dict[bytes, tuple[int, str]] = {}
    for piece in suspect.pieces:
        if piece.local is None or piece.local.numel() < 2:
            continue
        content = piece.local.to(torch.float64).numpy().tobytes()
        known = seen.setdefault(content, (piece.rank, piece.region.key))
        if known[1] != piece.region.key:
            return f"ranks {known[0]} and {piece.rank}"
    return ""


def name_forward(origin: Origin, coordinates: Coordinates, degrees: dict[str, int], by_kind: ByKind) -> Named:
    """Return what happened at the first module that went wrong, in words."""
    suspect, where = origin.suspect, origin.culprit
    what = "output" if origin.direction == FORWARD else "gradient"
    evidence = (
        f"first difference, {origin.direction}: {origin.end} of {origin.module}, off by {origin.error:.3g}",
        f"wrong on {list_ranks(origin.ranks)}",
    )
    missing = examine_replica_sums(suspect, coordinates)
    if missing is not None:
        sentence = f"the {what} of {where} is not summed: {missing.sentence}"
        return _place(Cause.MISSING_REDUCTION, sentence, f"{where}, {missing.where}", evidence, by_kind)
    factor = find_scale(suspect)
    if factor is not None:
        text, _ = name_factor(factor, dict.fromkeys((), 0))
        return _place(
            Cause.SCALE, f"the {what} of {where} is {text} times the right one", where, evidence, by_kind
        )
    if (moved := _moved_tokens(suspect)) is not None:
        return _place(moved.cause, f"in {where}: {moved.sentence}", where, evidence, by_kind)
    if (rounded := examine_rounding(suspect)) is not None:
        return _place(rounded.cause, f"in {where}: {rounded.sentence}", where, evidence, by_kind)
    if origin.direction == FORWARD and where.endswith("router"):
        return _place(
            Cause.ROUTING,
            f"{where} scores or chooses otherwise, from the right input",
            where,
            evidence,
            by_kind,
        )
    cause = Cause.FORWARD if origin.direction == FORWARD else Cause.BACKWARD
    sentence = f"the {what} goes wrong in {where}, from what was right until there"
    return _place(cause, sentence, where, evidence, by_kind)


def _place(cause: Cause, sentence: str, where: str, evidence: tuple[str, ...], by_kind: ByKind) -> Named:
    suspects = tuple(suspect for kind in ("token_loss", "loss") for suspect in by_kind.get(kind, ()))
    return Named(suspects, Verdict(cause, sentence, where, evidence))


def _moved_tokens(suspect: Suspect) -> Verdict | None:
    """Return a verdict if tokens hold the values of other tokens, over rows and positions together."""
    if suspect.expected.ndim < 3:
        return None
    width = suspect.expected.shape[2:].numel()
    flat = Suspect(suspect.key, suspect.expected.reshape(-1, width))
    flat_actual = suspect.whole().reshape(-1, width)
    source = match_slices(flat.expected, flat_actual, 0)
    moved = [to for to, origin in enumerate(source or []) if to != origin]
    if not moved:
        return None
    return Verdict(Cause.PERMUTATION, f"{len(moved)} tokens hold the values of other tokens")


def name_loss(by_kind: ByKind, degrees: dict[str, int], *, gradient_is_right: bool) -> list[Named]:
    """Return the causes of wrong losses or routing where every module's output is right."""
    named: list[Named] = []
    for kind in ("router_ids", "router_counts", "router_weights"):
        for suspect in by_kind.get(kind, ()):
            sentence = f"{suspect.name} routes otherwise although its input is right"
            named.append(Named((suspect,), Verdict(Cause.ROUTING, sentence, suspect.name)))
    if named:
        return named
    for suspect in by_kind.get("token_loss", ()):
        verdict = Verdict(Cause.FORWARD, "the loss of tokens is wrong although the logits are right", "loss")
        named.append(Named((suspect,), verdict))
    for suspect in by_kind.get("loss", ()):
        factor = find_scale(suspect)
        text, axes = name_factor(factor, degrees) if factor is not None else ("", "")
        what = "only the reported number is off" if gradient_is_right else "the loss is off"
        sentence = f"{suspect.name} loss: {what}, {text} times the right one"
        where = f"{suspect.name} loss" + (f", axis {axes}" if axes else "")
        named.append(Named((suspect,), Verdict(Cause.METRIC, sentence, where)))
    return named


def name_norm(suspects: Sequence[Suspect], degrees: dict[str, int]) -> list[Named]:
    """Return the cause of a wrong gradient norm over right gradients."""
    for suspect in suspects:
        expected, actual = float(suspect.expected), float(suspect.whole())
        ratio = actual / expected if expected else float("inf")
        squared, axes = name_factor(ratio * ratio, degrees)
        values = sorted({f"{float(piece.local):.10g}" for piece in suspect.pieces if piece.local is not None})
        what = "the norm" if suspect.name == "total" else "the clip coefficient"
        differ = f"; ranks disagree: {', '.join(values[:4])}" if len(values) > 1 else ""
        sentence = (
            f"the gradients are right, {what} is {ratio:.6g} times the right one (squared: {squared}){differ}"
        )
        where = "gradient norm" + (f", axis {axes}" if axes else "")
        evidence = (f"expected {expected:.10g}, actual {actual:.10g}",)
        return [Named((suspect,), Verdict(Cause.NORM, sentence, where, evidence))]
    return []


def name_update(suspects: Sequence[Suspect]) -> list[Named]:
    """Return the causes of wrong updates where gradients and norm are right."""
    named: list[Named] = []
    for suspect in suspects:
        actual = suspect.whole()
        factor = find_scale(suspect)
        if float(actual.abs().max()) == 0.0:
            verdict: Verdict | None = Verdict(
                Cause.STALE, "the optimizer did not move it although its gradient is right"
            )
        elif factor is not None:
            sentence = f"the update is {factor:.6g} times the right one although the gradient is right"
            verdict = Verdict(Cause.SCALE, sentence, "optimizer step")
        else:
            verdict = examine_places(suspect) or examine_rounding(suspect)
        named.append(Named((suspect,), verdict))
    return merge_named(named)


def name_state(suspects: Sequence[Suspect]) -> list[Named]:
    """Return the causes of wrong buffers where the routing is right."""
    named: list[Named] = []
    for suspect in suspects:
        rounded = examine_rounding(suspect)
        if rounded is not None:
            verdict = rounded
        else:
            wrong = int((suspect.whole() != suspect.expected).sum())
            sentence = (
                f"{suspect.name} moved otherwise than the routing of this step says ({wrong} of "
                f"{suspect.expected.numel()} elements)"
            )
            verdict = Verdict(Cause.STATE, sentence, suspect.name)
        named.append(Named((suspect,), verdict))
    return named
