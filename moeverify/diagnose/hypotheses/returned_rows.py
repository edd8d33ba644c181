"""Hypothesis: what routed experts return is right rows, but of other tokens or experts, or rows are lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.replay.experts import ExpertsFormula
from moeverify.diagnose.replay.returned_rows import LOST, ReturnedRows, RowFinder
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.layout import OtherRows, Served
from moeverify.results.observation import WrongElements
from moeverify.results.trial import Reason

_MOST_SERVED = 3


class OtherRowsHypothesis(Hypothesis):
    """Each wrong token is the sum of its own weights times rows that experts make of some token.

    It says which rows and not why, where no step of the exchange explains them.
    """

    name = "returned_rows"
    quantities = frozenset({Quantity.OUTPUT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Find the rows of which each token's output is the sum."""
        (tensor,) = tensors
        origin = inputs.origin_of(tensor)
        named = inputs.formula(origin) if origin is not None and tensor.precision == torch.float64 else None
        if named is None or not isinstance(named.formula, ExpertsFormula) or tensor.expected.ndim != 3:
            return self.untried(Reason.NOT_COMPARABLE)
        finder = RowFinder(named.formula)
        if not finder.is_small:
            return self.untried(Reason.NOT_COMPARABLE)
        actual, expected = (each.flatten(0, 1) for each in (tensor.whole, tensor.expected))
        found = finder.find(actual, expected, tensor.exact)
        if found is None:
            return self.refuse()
        operation = _describe(found, named.formula)
        seen = WrongElements(num_wrong=operation.num_wrong, num_elements=operation.num_rows)
        return self.accept(explain_by(Cause.FORWARD, operation, tensors, inputs), seen)


def _describe(found: ReturnedRows, formula: ExpertsFormula) -> OtherRows:
    """Return how many rows of which experts are others, the most frequent first."""
    ids = formula.ids.flatten(0, 1)
    own = torch.arange(len(ids)).unsqueeze(1).expand_as(ids)
    wrong = (found.tokens != own) | (found.experts != ids)
    counts: Counter[tuple[int, int, bool]] = Counter()
    for expert, token, by, right in zip(
        ids[wrong].tolist(),
        found.tokens[wrong].tolist(),
        found.experts[wrong].tolist(),
        own[wrong].tolist(),
        strict=True,
    ):
        counts[expert, by, token not in (right, LOST)] += 1
    totals = torch.bincount(ids.flatten(), minlength=formula.count).tolist()
    served = [
        Served(expert=expert, by=by, of_others=of_others, num_rows=number, num_all=totals[expert])
        for (expert, by, of_others), number in counts.most_common()
    ]
    return OtherRows(
        num_wrong=int(wrong.sum()),
        num_rows=ids.numel(),
        served=tuple(served[:_MOST_SERVED]),
        num_more=sum(each.num_rows for each in served[_MOST_SERVED:]),
    )


HYPOTHESIS = OtherRowsHypothesis()
