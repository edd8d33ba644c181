"""Hypothesis: a loss averages its tokens otherwise, which the gradient that it passes back to each of them tells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moeverify.diagnose.cross_entropy.formula import CrossEntropyFormula, CrossEntropyGradientFormula
from moeverify.diagnose.cross_entropy.search import Cell
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, Scope
from moeverify.diagnose.inputs import LM, DiagnosisInputs
from moeverify.diagnose.token_groups import Fields, TokenMap
from moeverify.diagnose.token_weights import SAME, Explainer, list_sources, measure_weights
from moeverify.diagnose.wrong_tensor import RankShard, WrongTensor
from moeverify.layout.region import Region
from moeverify.results.cause import Cause
from moeverify.results.change import Change
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.observation import WeightsOfTokens
from moeverify.results.token_weights import Reaveraged
from moeverify.results.trial import Reason
from moeverify.train.module_taps import BACKWARD, FORWARD

_LEAST_NUMBER, _MOST_NUMBER, _GRID = 1e-3, 30.0, 20
_STEPS, _DIFFERENCE, _LARGEST = 12, 1e-5, 50.0
_WRITTEN = 1e-8
"""Relative: a number of six digits that is as near as this is what somebody has written."""


class TokenWeightsHypothesis(Hypothesis):
    """The weights of the tokens are those of another average: of means, of counts of groups, without some tokens."""

    name = "token_weights"
    quantities = frozenset({Quantity.GRADIENT})

    own_scopes = (Scope.TOGETHER,)
    """All gradients which are left have this one cause."""

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Measure the weight of each token, and look for an average that gives all of them."""
        origin = inputs.origins.get(BACKWARD)
        if origin is None or FORWARD in inputs.origins or not inputs.comes_from_loss(origin):
            return self.untried(Reason.NOT_COMPARABLE)
        if tensors[0].precision != torch.float64 or origin.tensor.expected.dim() < 3:
            return self.untried(Reason.NOT_COMPARABLE)
        formula = inputs.cross_entropy()
        changes, measured = _measure(origin.tensor, formula)
        if measured is None:
            return self.refuse()
        weights, counted = measured
        fields = Fields.of((counted.shape[0], counted.shape[1]), inputs.micro_batches)
        if fields is None:
            return self.untried(Reason.NOT_COMPARABLE)
        some = weights[counted]
        seen = WeightsOfTokens(least=float(some.min()), most=float(some.max()), num_tokens=len(some))
        keys = {} if formula is None or formula.labels.shape != counted.shape else {"label": formula.labels}
        sources = list_sources(inputs)
        averagings = Explainer(TokenMap(fields, counted), weights, sources, keys).explain()  # type: ignore[arg-type]
        if not averagings and not changes:
            return self.refuse(seen)
        is_right = bool((weights[counted] - 1.0).abs().max() <= SAME)
        explanation = Explanation(
            cause=Cause.SHARE_WEIGHTS,
            subject=Subject(quantity=Quantity.LOSS, tensors=(LM,)),
            operation=Reaveraged(
                averagings=averagings, changes=changes, is_weighed=not is_right and not averagings
            ),
        )
        return self.accept(explanation, seen)


def _measure(
    tensor: WrongTensor, formula: CrossEntropyFormula | None
) -> tuple[tuple[Change, ...], tuple[Tensor, Tensor] | None]:
    """Return the weights of the tokens, and by which other formula of each token's loss a gradient has these."""
    measured = measure_weights(tensor)
    if measured is not None or formula is None or tensor.expected.shape != formula.logits.shape:
        return (), measured
    varied = CrossEntropyGradientFormula(formula)
    whole = Cell.of(RankShard(0, Region.whole(tensor.expected.shape), None))
    # One row tells most formulas from the right one.
    row = tuple(tensor.worst_shard.region.dims[0])[:1]
    part = whole.pick(torch.tensor(row), torch.arange(tensor.expected.shape[1]))
    for way in varied.ways:
        changed = {way.place: way}
        if measure_weights(_take_row(tensor, row, varied.evaluate(part, changed))) is not None:
            measured = measure_weights(replace(tensor, expected=varied.evaluate(whole, changed)))
            if measured is not None:
                return (way,), measured
    for start in {(way.part, way.way, way.name): way for way in varied.fits}.values():
        fitted = _fit(varied, part, tensor, row, start)
        if fitted is not None:
            measured = measure_weights(
                replace(tensor, expected=varied.evaluate(whole, {fitted.part: fitted}))
            )
            if measured is not None:
                return (fitted,), measured
    return (), None


def _fit(
    varied: CrossEntropyGradientFormula, part: Cell, tensor: WrongTensor, row: tuple[int, ...], start: Change
) -> Change | None:
    """Return a way with the number by which a row's gradients are multiples of its own; None where none is."""
    actual = _take_row(tensor, row, torch.zeros_like(varied.evaluate(part, {}))).whole

    def leave(at: float) -> Tensor:
        way = start.model_copy(update={"number": math.exp(at)})
        expected = varied.evaluate(part, {way.part: way})
        weights = (expected * actual).sum(-1) / expected.square().sum(-1).clamp(min=1e-300)
        return actual - weights.unsqueeze(-1) * expected

    low, high = math.log(_LEAST_NUMBER), math.log(_MOST_NUMBER)
    places = [low + (high - low) * each / _GRID for each in range(_GRID + 1)]
    left = [float(leave(at).norm()) for at in places]
    at = places[min(range(len(places)), key=left.__getitem__)]
    for _ in range(_STEPS):  # of Gauss and Newton
        residual = leave(at)
        slope = (leave(at + _DIFFERENCE) - leave(at - _DIFFERENCE)) / (2.0 * _DIFFERENCE)
        square = float(slope.square().sum())
        if not square:
            return None
        at -= max(min(float((slope * residual).sum()) / square, 0.3), -0.3)
    if not abs(at) < _LARGEST:
        return None
    found, short = math.exp(at), float(f"{math.exp(at):.6g}")
    way = start.model_copy(update={"number": short if abs(short / found - 1.0) <= _WRITTEN else found})
    expected = _take_row(tensor, row, varied.evaluate(part, {way.part: way}))
    return way if measure_weights(expected) is not None else None


def _take_row(tensor: WrongTensor, row: tuple[int, ...], expected: Tensor) -> WrongTensor:
    """Return one row of a gradient alone, with what it should be there (1, S, ...)."""
    shards = []
    for shard in tensor.shards:
        rows, *dims = shard.region.dims
        if shard.local is not None and row[0] in rows:
            at = tuple(rows).index(row[0])
            region = Region.box(expected.shape, ((0,), *dims))
            shards.append(RankShard(shard.rank, region, shard.values()[at : at + 1]))
    return WrongTensor(tensor.key, expected, tuple(shards), tensor.precision)


HYPOTHESIS = TokenWeightsHypothesis()
