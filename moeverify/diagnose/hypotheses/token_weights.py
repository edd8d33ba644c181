"""Hypothesis: a loss averages its tokens otherwise, which the gradient that it passes back to each of them tells."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, Scope
from moeverify.diagnose.inputs import LM, DiagnosisInputs
from moeverify.diagnose.token_groups import Fields, TokenMap
from moeverify.diagnose.token_weights import Explainer, measure_weights
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
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
        measured = measure_weights(origin.tensor)
        if measured is None:
            return self.refuse()
        weights, counted = measured
        fields = Fields.of((counted.shape[0], counted.shape[1]), inputs.micro_batches)
        if fields is None:
            return self.untried(Reason.NOT_COMPARABLE)
        some = weights[counted]
        seen = WeightsOfTokens(least=float(some.min()), most=float(some.max()), num_tokens=len(some))
        formula = inputs.cross_entropy()
        keys = {} if formula is None or formula.labels.shape != counted.shape else {"label": formula.labels}
        sources = [*inputs.axes.sources, *inputs.axes.loss_counts]
        averagings = Explainer(TokenMap(fields, counted), weights, sources, keys).explain()  # type: ignore[arg-type]
        if not averagings:
            return self.refuse(seen)
        explanation = Explanation(
            cause=Cause.SHARE_WEIGHTS,
            subject=Subject(quantity=Quantity.LOSS, tensors=(LM,)),
            operation=Reaveraged(averagings=averagings),
        )
        return self.accept(explanation, seen)


HYPOTHESIS = TokenWeightsHypothesis()
