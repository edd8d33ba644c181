"""Hypothesis: what routed experts return is right rows, but of other tokens or experts, or rows are lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.hypotheses.reweighted_rows import Copies, fit_weights, list_copies
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.routed.experts import RoutedExperts
from moeverify.diagnose.routed.lost_copies import find_lost
from moeverify.diagnose.routed.rank_rows import find_counts, find_row_offset, list_rank_rows
from moeverify.diagnose.routed.returned_rows import LOST, ExpertRows, ReturnedRows, RowFinder
from moeverify.diagnose.slices import MOST_SLICES
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.layout import OtherRows, Served
from moeverify.results.observation import WrongElements
from moeverify.results.operation import Reweighted
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
        if origin is None or inputs.search is None or tensor.precision != torch.float64:
            return self.untried(Reason.NOT_COMPARABLE)
        operation: OtherRows | Reweighted | None = find_other_rows(tensor, inputs)
        for copies in (
            list_copies(origin, inputs.search) if operation is None and tensor.expected.ndim == 3 else ()
        ):
            operation = operation or _find_moved(copies, tensor, inputs.search.bound)
        if operation is None:
            return self.refuse()
        seen = WrongElements(num_wrong=operation.num_wrong, num_elements=operation.num_rows)
        return self.accept(explain_by(Cause.FORWARD, operation, tensors, inputs), seen)


def find_other_rows(tensor: WrongTensor, inputs: DiagnosisInputs) -> OtherRows | None:
    """Return which rows the experts of the reference model return in the place of others."""
    origin = inputs.origin_of(tensor)
    experts = inputs.experts(origin) if origin is not None else None
    if experts is None or tensor.expected.ndim != 3:
        return None
    finder = ExpertRows(experts)
    if not finder.is_small:
        return None
    actual, expected = (each.flatten(0, 1) for each in (tensor.whole, tensor.expected))
    found = finder.find(actual, expected, tensor.exact)
    return None if found is None else _describe(found, experts)


def _find_moved(copies: Copies, tensor: WrongTensor, bound: float) -> Reweighted | None:
    """Return how many rows of a module inside are summed at other tokens, by the right weights."""
    wanted, found = (each.flatten(0, 1)[copies.tokens] for each in (tensor.expected, tensor.whole))
    right, left = fit_weights(copies.rows, wanted, wanted)
    own = torch.arange(len(copies.tokens) * right.shape[1]).view(right.shape)
    rows = copies.rows.flatten(0, 1)
    if len(rows) > MOST_SLICES or left > bound:
        return None
    taken = RowFinder(rows, own, right).find(found, wanted, tensor.exact)
    if taken is None:
        return None
    return Reweighted(
        rows=copies.module, way="of-others", num_wrong=int((taken != own).sum()), num_rows=copies.num_rows
    )


def _describe(found: ReturnedRows, experts: RoutedExperts) -> OtherRows:
    """Return how many rows of which experts are others, the most frequent first."""
    ids = experts.ids
    own = torch.arange(len(ids)).unsqueeze(1).expand_as(ids)
    is_lost = found.tokens == LOST
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
    totals = torch.bincount(ids.flatten(), minlength=experts.count).tolist()
    served = [
        Served(expert=expert, by=by, of_others=of_others, num_rows=number, num_all=totals[expert])
        for (expert, by, of_others), number in counts.most_common()
    ]
    rows = list(list_rank_rows(experts.calls, ids, experts.count, found))
    return OtherRows(
        num_wrong=int(wrong.sum()),
        num_rows=ids.numel(),
        served=tuple(served[:_MOST_SERVED]),
        num_more=sum(each.num_rows for each in served[_MOST_SERVED:]),
        counts=find_counts(rows),
        offset=find_row_offset(rows),
        are_lost=bool((is_lost == wrong).all()),
        lost=find_lost(experts.calls, ids, is_lost) if bool((is_lost == wrong).all()) else None,
    )


HYPOTHESIS = OtherRowsHypothesis()
