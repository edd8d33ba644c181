"""Hypothesis: a loss averages its tokens otherwise, which the gradient that it passes back to each of them tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, Scope
from moeverify.diagnose.inputs import LM, DiagnosisInputs
from moeverify.diagnose.replay.cross_entropy import CrossEntropyFormula, CrossEntropyGradientFormula
from moeverify.diagnose.replay.language import Cell
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


class TokenWeightsHypothesis(Hypothesis):
    """The weights of the tokens are those of another average: of means, of counts of groups, without some tokens."""

    name = "token_weights"
    quantities = frozenset({Quantity.GRADIENT})

    def scopes(self, quantity: Quantity) -> tuple[Scope, ...]:
        """Return that all gradients which are left have this one cause."""
        del quantity
        return (Scope.TOGETHER,)

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
    return (), None


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
