"""The factor on all gradients between the last backward pass and the optimizer step: a clip, or a divisor.

A clip hides a wrong factor of the gradients, so they are compared as before it. A divisor, such as the number
of micro-batches in `p.grad /= n`, is a part of the gradients. The factor of a clip depends on the gradients, and
makes their norm equal to a limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moeverify.results.checks import Kind
from moeverify.scripts.compare.calls import calls_of
from moeverify.scripts.record.norm_parts import find_shared_ratio
from moeverify.scripts.record.read import RankRecord, RecordedRun
from moeverify.train.calls.call import LoopCall

_CLIP_EPSILON = 1e-6  # added to the norm by torch.nn.utils.clip_grad_norm_
_SAME = 1e-4  # relative, for norms in float32
_LIMIT = 1e-3  # relative difference of the norms that a clip leaves
_LESS = 10.0  # how many times less a divisor must vary than the norms
_WHOLE = 1e-6  # relative distance of a divisor from a whole number
# Largest divisor that is known by its value: few numbers are as near to such a quotient by chance.
_MOST = 64


@dataclass(frozen=True)
class Coefficient:
    """The common factor applied to all gradients between the last backward pass and the optimizer step.

    `norm` is the gradient norm from a clip of torch, or None if the script scales by itself. `is_known` is
    false if the gradients do not show the factor: they were reduced after the backward pass, or are in a
    flat buffer.
    """

    value: float = 1.0
    norm: float | None = None
    is_known: bool = True


def find_coefficient(rank: RankRecord, step: int) -> Coefficient:
    """Return the coefficient of a rank, from its call of torch's clip or else from its gradients.

    It is unknown unless at least half of the gradients share a ratio.
    """
    calls = calls_of(rank, step)
    clip = next((call for call in reversed(calls) if call.norm is not None and call.max_norm), None)
    if clip is not None:
        return _of_clip(clip)
    if any(call.name.startswith("scaler") for call in calls):
        return Coefficient()  # the factor is the loss scale of a backward pass, not a clip
    shared = find_shared_ratio(
        math.sqrt(line.squares) / line.before
        for (at, kind, _), line in rank.values.items()
        if at == step and kind == Kind.GRADIENT and line.before and line.squares > 0.0
    )
    return Coefficient(is_known=False) if shared is None else Coefficient(shared)


def find_coefficients(
    expected: RecordedRun, actual: RecordedRun, step: int
) -> dict[tuple[int, int], Coefficient]:
    """Return the coefficients of a step that a comparison undoes, by id of the rank's record and step.

    The value is 1 unless it is known for every rank of both runs, and in a run that divides its gradients.
    """
    ranks = (*expected.ranks, *actual.ranks)
    found = {id(rank): find_coefficient(rank, step) for rank in ranks}
    is_undone = all(each.is_known for each in found.values())
    # A run of one device has whole gradients, whose norm is that of the clip.
    is_undone &= not _divides(expected if _find_scaled(expected) else actual)
    return {(number, step): each if is_undone else replace(each, value=1.0) for number, each in found.items()}


def _of_clip(clip: LoopCall) -> Coefficient:
    assert clip.norm is not None
    assert clip.max_norm is not None
    if not math.isfinite(clip.norm):
        return Coefficient(1.0, clip.norm)
    return Coefficient(min(1.0, clip.max_norm / (clip.norm + _CLIP_EPSILON)), clip.norm)


def _find_scaled(run: RecordedRun) -> dict[int, Coefficient]:
    """Return the coefficients of the steps in which they change the gradients."""
    found = {step: find_coefficient(run.ranks[0], step) for step in run.steps}
    return {step: each for step, each in found.items() if abs(each.value - 1.0) > _SAME}


def _divides(run: RecordedRun) -> bool:
    """Return whether a script divides gradients by itself, and does not clip them.

    A divisor is a small whole number in all steps, or the resulting norm is not the same limit in all of them.
    The norm is known on one device. Of many ranks, a divisor differs far less between steps than their norms.
    torch's clip shows its factor, which then is that of the clip alone.
    """
    scaled = _find_scaled(run)
    if not scaled or any(each.norm is not None for each in scaled.values()):
        return False
    factors = [each.value for each in scaled.values()]
    norms = [_measure_norm(run, step) for step in scaled]
    if all(map(_is_quotient, factors)):
        return True
    return _spread(norms) > (_LIMIT if run.world_size == 1 else _LESS * _spread(factors))


def _measure_norm(run: RecordedRun, step: int) -> float:
    """Return the norm of the gradients that the optimizers of all ranks get."""
    lines = (
        line
        for rank in run.ranks
        for (at, kind, _), line in rank.values.items()
        if (at, kind) == (step, Kind.GRADIENT)
    )
    return math.sqrt(sum(line.squares for line in lines))


def _spread(values: Sequence[float]) -> float:
    return max(values) / min(values) - 1.0 if min(values) > 0.0 else math.inf


def _is_quotient(factor: float) -> bool:
    """Return whether a factor is a whole number up to `_MOST`, or 1 divided by one."""
    larger = max(factor, 1.0 / factor)
    return larger < _MOST and abs(larger / round(larger) - 1.0) < _WHOLE
