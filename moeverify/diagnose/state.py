"""Names the causes of what is not a gradient: initial values, forward passes, losses, norms, updates, state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from moeverify.diagnose.axes import Axes
from moeverify.diagnose.evidence import EXACT, Key, Suspect, measure_factor
from moeverify.diagnose.first_divergence import Origin
from moeverify.diagnose.gradient import Named, merge_named
from moeverify.diagnose.permutation import examine_places, match_slices
from moeverify.diagnose.replicas import examine_replica_sums
from moeverify.diagnose.rounding import examine_rounding
from moeverify.diagnose.verdict import Verdict, list_ranks, name_factor
from moeverify.results.cause import Cause
from moeverify.train.module_taps import FORWARD

ByKind = Mapping[str, Sequence[Suspect]]


def find_scale(suspect: Suspect) -> float | None:
    """Return k if the tensor is k times its golden to float64's precision, else None."""
    factor, residual = measure_factor(suspect)
    return factor if residual < EXACT else None


def name_initial(suspects: Sequence[Suspect]) -> list[Named]:
    """Return the causes of wrong initial values."""
    named: list[Named] = []
    for suspect in suspects:
        verdict = examine_places(suspect) or examine_rounding([suspect]) or _zero(suspect)
        if verdict is None:
            verdict = _odd_replica(suspect)
        named.append(Named((suspect,), verdict))
    return merge_named(named)


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


def name_forward(  # noqa: PLR0911 - one return for each thing that it can have been
    origin: Origin, axes: Axes, by_kind: ByKind
) -> Named:
    """Return what happened at the first module that went wrong, in words."""
    suspect, where = origin.suspect, origin.culprit
    what = "output" if origin.direction == FORWARD else "gradient"
    evidence = (
        f"first difference, {origin.direction}: {origin.end} of {origin.module}, off by {origin.error:.3g}",
        f"wrong on {list_ranks(origin.ranks)}",
    )

    def say(cause: Cause, sentence: str, place: str = where, fitting: tuple[str, ...] = ()) -> Named:
        losses = tuple(found for kind in ("token_loss", "loss") for found in by_kind.get(kind, ()))
        return Named(losses, Verdict(cause, sentence, place, evidence, fitting), subject=suspect)

    if origin.direction == FORWARD and origin.first_micro_batch > 0:
        sentence = (
            f"{where} is right in the first micro-batch and wrong from micro-batch {origin.first_micro_batch} on: "
            "something that should change once a step changed between them"
        )
        return say(Cause.STATE, sentence)
    if (missing := examine_replica_sums(suspect, axes.groups_of(where))) is not None:
        sentence = f"the {what} of {where}: {missing.sentence}"
        return say(Cause.MISSING_REDUCTION, sentence, f"{where}, {missing.where}", missing.axes)
    if (factor := find_scale(suspect)) is not None:
        text, fitting = name_factor(factor, axes.degrees_of(where))
        return say(Cause.SCALE, f"the {what} of {where} is {text} times the right one", where, fitting)
    if (moved := _moved_tokens(suspect)) is not None:
        return say(moved.cause, f"in {where}: {moved.sentence}")
    if (rounded := examine_rounding([suspect])) is not None:
        return say(rounded.cause, f"in {where}: {rounded.sentence}")
    if origin.direction == FORWARD and any(other.name == where for other in by_kind.get("router_ids", ())):
        return say(Cause.ROUTING, f"{where} chooses otherwise, from the right input")
    cause = Cause.FORWARD if origin.direction == FORWARD else Cause.BACKWARD
    return say(cause, f"the {what} goes wrong in {where}, from what was right until there")


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


def name_routing(by_kind: ByKind, num_tokens: int) -> list[Named]:
    """Return the causes of wrong routing where every module's output is right.

    `num_tokens` counts the tokens of the batch, padding included.
    """
    named: list[Named] = []
    for suspect in by_kind.get("router_ids", ()):
        sentence = f"{suspect.name} chooses otherwise although its input is right"
        named.append(Named((suspect,), Verdict(Cause.ROUTING, sentence, suspect.name)))
    for suspect in by_kind.get("router_weights", ()):
        sentence = f"{suspect.name} weighs its choice otherwise although its input is right"
        named.append(Named((suspect,), Verdict(Cause.FORWARD, sentence, suspect.name)))
    if named:
        return named
    return [
        Named((suspect,), _name_counts(suspect, num_tokens)) for suspect in by_kind.get("router_counts", ())
    ]


def _name_counts(suspect: Suspect, num_tokens: int) -> Verdict:
    expected, actual = float(suspect.expected.sum()), float(suspect.whole().sum())
    factor = find_scale(suspect)
    if factor is not None:
        sentence = f"{suspect.name} counts every token {factor:.6g} times; the routing itself is right"
        return Verdict(Cause.METRIC, sentence, suspect.name)
    if actual > expected and actual % num_tokens == 0:
        sentence = f"{suspect.name} counts {actual:.0f} choices where {expected:.0f} are of valid tokens: padding too"
        return Verdict(Cause.PADDING, sentence, suspect.name)
    sentence = f"{suspect.name} counts {actual:.0f} choices where the routing says {expected:.0f}"
    return Verdict(Cause.STATE, sentence, suspect.name)


def name_loss(by_kind: ByKind, degrees: Mapping[str, int], *, gradient_is_right: bool) -> list[Named]:
    """Return the causes of wrong losses where routing and every module's output are right."""
    suspects = [*by_kind.get("token_loss", ()), *by_kind.get("loss", ())]
    if not gradient_is_right:
        sentence = "the loss of tokens is wrong although the logits are right"
        return [Named(tuple(suspects), Verdict(Cause.FORWARD, sentence, "loss"))]
    named: list[Named] = []
    for suspect in suspects:
        factor = find_scale(suspect)
        text, axes = name_factor(factor, degrees) if factor is not None else ("not a multiple of", ())
        how = f"{text} times the right one" if factor is not None else "and no multiple of the right one"
        sentence = f"only a reported number is off, the {suspect.name} loss, {how}: the gradients are right"
        where = f"{suspect.name} loss" + _name_axes(axes)
        named.append(Named((suspect,), Verdict(Cause.METRIC, sentence, where, axes=axes)))
    return named


def name_term(by_kind: ByKind) -> Verdict | None:
    """Return a verdict if the losses themselves say which term is computed otherwise."""
    wrong = [suspect for suspect in by_kind.get("loss", ()) if suspect.name != "total"]
    if not wrong:
        return None
    terms = " and ".join(suspect.name for suspect in wrong)
    values = [f"{s.name}: expected {float(s.expected):.10g}, actual {float(s.whole()):.10g}" for s in wrong]
    sentence = f"the {terms} loss is computed otherwise, from the right routing"
    return Verdict(Cause.FORWARD, sentence, f"{terms} loss", tuple(values))


def name_norm(suspects: Sequence[Suspect], degrees: Mapping[str, int]) -> list[Named]:
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
        where = "gradient norm" + _name_axes(axes)
        evidence = (f"expected {expected:.10g}, actual {actual:.10g}",)
        return [Named((suspect,), Verdict(Cause.NORM, sentence, where, evidence, axes))]
    return []


def _name_axes(axes: Sequence[str]) -> str:
    return f", axis {', '.join(axes)}" if axes else ""


def name_update(suspects: Sequence[Suspect], clip: float | None) -> list[Named]:
    """Return the causes of wrong updates where gradients and norm are right; `clip` is the golden's coefficient."""
    named: list[Named] = []
    for suspect in suspects:
        actual = suspect.whole()
        factor = find_scale(suspect)
        if float(actual.abs().max()) == 0.0:
            verdict: Verdict | None = Verdict(
                Cause.STALE, "the optimizer did not move it although its gradient is right"
            )
        elif factor is not None and clip is not None and abs(factor * clip - 1.0) < 1e-6:
            sentence = f"the norm is right but nothing is clipped by it: the update is 1 / {clip:.6g} times"
            verdict = Verdict(Cause.NORM, sentence, "clip")
        elif factor is not None:
            sentence = f"the update is {factor:.6g} times the right one although the gradient is right"
            verdict = Verdict(Cause.SCALE, sentence, "optimizer step")
        else:
            verdict = examine_places(suspect) or examine_rounding([suspect])
        named.append(Named((suspect,), verdict))
    return merge_named(named)


def name_state(suspects: Sequence[Suspect], previous: Callable[[Key], Tensor | None]) -> list[Named]:
    """Return the causes of wrong buffers where the routing is right; `previous` gives them a step earlier."""
    return [Named((suspect,), _name_buffer(suspect, previous(suspect.key))) for suspect in suspects]


def _name_buffer(suspect: Suspect, previous: Tensor | None) -> Verdict:
    actual = suspect.whole()
    if previous is not None and torch.equal(actual, previous.to(actual.dtype)):
        sentence = f"{suspect.name} did not move in this step although the routing says it should"
        return Verdict(Cause.STALE, sentence, suspect.name)
    if (rounded := examine_rounding([suspect])) is not None:
        return rounded
    wrong = int((actual != suspect.expected).sum())
    sentence = (
        f"{suspect.name} moved otherwise than the routing of this step says "
        f"({wrong} of {suspect.expected.numel()} elements)"
    )
    return Verdict(Cause.STATE, sentence, suspect.name)
