"""Hypothesis: a selection bias moves by the right counts, and by another rule than the sign of mean less count."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import NamedTuple

import torch
from torch import Tensor

from moeverify.diagnose.families import module_of
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import INITIAL_VALUE, STEP_BEFORE, DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.results.formula_names import BiasWay
from moeverify.results.operation import MovedOtherwise
from moeverify.results.trial import Reason

_NAME = "selection_bias"

_ROUNDING = 1e-6
"""Of the largest bias: what float32 leaves of its sums."""

_MOST_ALIKE = 3
"""More rules that give the same say nothing."""


class BiasRuleHypothesis(Hypothesis):
    """The move of each expert is that of another rule, with a part or two otherwise; not that of the right one."""

    name = "bias_rule"
    quantities = frozenset({Quantity.BUFFER})

    def applies(self, tensor: WrongTensor, inputs: DiagnosisInputs) -> bool:
        """Return whether it is the bias of a router."""
        return super().applies(tensor, inputs) and tensor.name.endswith(_NAME)

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Move the bias of before by each rule."""
        (tensor,) = tensors
        times = inputs.earlier(tensor.key)
        before = times.get(STEP_BEFORE)
        before = times.get(INITIAL_VALUE) if before is None else before
        counts = inputs.golden(Kind.ROUTER_COUNTS, module_of(tensor.name), 0)
        if before is None or counts is None:
            return self.untried(Reason.NO_EARLIER_VALUE)
        right = tensor.expected - before.to(torch.float64)
        moved = tensor.whole - before.to(torch.float64)
        allowed = _ROUNDING * float(tensor.expected.abs().max() + right.abs().max())
        if float(moved.abs().max()) <= allowed:
            return self.refuse()  # it has not moved at all
        seen = _Move(counts.to(torch.float64), before.to(torch.float64), moved, float(right.abs().max()))
        fitting: dict[tuple[BiasWay, ...], Tensor] = {}
        for rule in _list_rules():
            if fitting and len(rule) > len(next(iter(fitting))):
                break
            move = _make(rule, seen)
            if float((move - moved).abs().max()) <= allowed:
                fitting[rule] = move
        # One that leaves open by how much says less than one that does not.
        known = [rule for rule in fitting if "other-rate" not in rule] or list(fitting)
        if ("other-rate",) in fitting:  # beyond its bound, what is bounded is a sign
            known = [rule for rule in known if not set(_BOUNDED) & set(rule)] or [("other-rate",)]
        if not known and _increases(seen, allowed):
            known, fitting = [("increasing",)], {("increasing",): moved}
        if not 0 < len(known) <= _MOST_ALIKE:
            return self.refuse()
        rate = float((fitting[known[0]] / right)[right != 0.0].abs().median()) if seen.rate else 0.0
        operation = MovedOtherwise(rule=known[0], rivals=tuple(known[1:]), times=rate)
        return self.accept(explain_by(Cause.STATE, operation, tensors, inputs))


class _Move(NamedTuple):
    """The counts (E) of a step, the bias (E) of before and how it has moved (E), and by how much it should each."""

    counts: Tensor
    before: Tensor
    moved: Tensor
    rate: float


_PARTS: Mapping[str, Sequence[BiasWay]] = {
    "center": ("median", "largest", "smallest", "of-busy", "frequency"),
    "shape": (
        "unsigned",
        "root",
        "overloaded",
        "underloaded",
        "up-at-mean",
        "down-at-mean",
        "tanh",
        "sigmoid",
        "arctan",
        "clipped",
    ),
    "scale": ("over-mean", "over-largest", "over-total", "over-deviation"),
    "direction": ("reversed",),
    "rate": ("other-rate",),
    "after": ("centred", "not-below-zero", "kept"),
}
"""The parts of a move, rate * sign(mean - count), with the ways in which each may be otherwise."""


_BOUNDED = ("tanh", "sigmoid", "arctan", "clipped")

_LEAST_DIFFERENT = 6
"""So many different counts are in the order of their moves by chance in one of 720 cases."""


def _increases(seen: _Move, allowed: float) -> bool:
    """Return whether experts of equal counts move alike, those of larger ones less, and not all by one size."""
    counts, order = seen.counts.sort()
    steps, moves = counts.diff(), -seen.moved[order].diff()
    alike = (moves.abs() <= allowed)[steps == 0.0]
    up = (moves > allowed)[steps > 0.0]
    return bool(alike.all()) and bool(up.all()) and int((steps > 0.0).sum()) + 1 >= _LEAST_DIFFERENT


def _list_rules() -> Iterator[tuple[BiasWay, ...]]:
    """Yield the rules with one way of one part, then those with ways of two."""
    for count in (1, 2):
        for parts in combinations(_PARTS.values(), count):
            yield from product(*parts)


def _make(ways: Collection[str], seen: _Move) -> Tensor:
    """Return the move (E) by a rule with these ways."""
    counts = seen.counts
    centers: Mapping[str, Tensor] = {
        "median": counts.median(),
        "largest": counts.max(),
        "smallest": counts.min(),
        "of-busy": counts[counts > 0].mean(),
        # A share of the choices is below 1, and so below each count that is not zero.
        "frequency": torch.full_like(counts[0], 0.5),
    }
    less = next((value for name, value in centers.items() if name in ways), counts.mean()) - counts
    # The scale of the difference makes another shape only of what is bounded.
    scales = {
        "over-mean": counts.mean(),
        "over-largest": less.abs().max(),
        "over-total": counts.sum(),
        "over-deviation": counts.std(),
    }
    scale = next((value for name, value in scales.items() if name in ways), less.new_ones(()))
    scaled = less / scale.clamp(min=1e-300)
    shapes: Mapping[str, Tensor] = {
        "unsigned": less,
        "root": less.sign() * less.abs().sqrt(),
        "overloaded": less.sign().clamp(max=0.0),
        "underloaded": less.sign().clamp(min=0.0),
        "up-at-mean": torch.where(less >= 0.0, 1.0, -1.0).to(less.dtype),
        "down-at-mean": torch.where(less > 0.0, 1.0, -1.0).to(less.dtype),
        "tanh": scaled.tanh(),
        "sigmoid": scaled.sigmoid(),
        "arctan": scaled.arctan(),
        "clipped": scaled.clamp(-1.0, 1.0),
    }
    shape = next((value for name, value in shapes.items() if name in ways), less.sign())
    shape = -shape if "reversed" in ways else shape
    shape = shape - shape.mean() if "centred" in ways else shape
    if {"other-rate", "unsigned", "root", *_BOUNDED} & set(ways):
        rate = max(float(seen.moved @ shape) / max(float(shape @ shape), 1e-300), 0.0)
    else:
        rate = seen.rate
    move = rate * shape
    if "not-below-zero" in ways:
        return (seen.before + move).clamp(min=0.0) - seen.before
    if "kept" in ways:
        left, size = seen.moved - move, float(seen.before @ seen.before)
        return move + (float(left @ seen.before) / size if size else 0.0) * seen.before
    return move


HYPOTHESIS = BiasRuleHypothesis()
