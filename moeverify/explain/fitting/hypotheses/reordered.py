"""Hypothesis: right values are in a wrong order, after a wrong reshape, transpose or chunk order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.layouts.levels import Counts, list_parameter_levels
from moeverify.explain.fitting.layouts.search import OrderSearch
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.layout import DimName, Reordered
from moeverify.results.observation import TriedOrders

_OF_KEYS, _OF_EXPERTS = (".k_", ".v_", ".key", ".value"), ".experts."


class ReorderedHypothesis(Hypothesis):
    """One order of the grammar of layouts explains all places, on all ranks or on the wrong ones.

    Other orders that result in the same tensor are reported in addition.
    """

    name = "reordered"
    quantities = frozenset(
        {
            Quantity.INITIAL_VALUE,
            Quantity.GRADIENT,
            Quantity.UPDATE,
            Quantity.LOADED,
            Quantity.TENSOR,
        }
    )

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Test the orders of the whole tensor, then of each rank's values."""
        (tensor,) = tensors
        search = OrderSearch(tensor)
        found = search.run(list_parameter_levels(tensor, _count_parts(tensor.name, inputs)))
        if found is None:
            return None
        seen = TriedOrders(num_tried=search.num_tried, num_giving=len(found.orders))
        operation = Reordered(scope=found.scope, orders=found.orders, ranks=found.ranks)
        cause = Cause.DUPLICATE if found.orders[0].way == "same" else Cause.PERMUTATION
        return self.accept(explain_by(cause, operation, (tensor,), inputs), seen)


def _count_parts(name: str, inputs: DiagnosisInputs) -> Counts:
    sizes = {source.name: source.size for source in inputs.axes.counts_of(name)}
    heads: DimName = "key-value heads" if any(part in name for part in _OF_KEYS) else "heads"
    kinds: Sequence[DimName] = (heads, "experts") if _OF_EXPERTS in name else (heads,)
    named: Mapping[DimName, int] = {each: sizes[each] for each in kinds if each in sizes}
    return Counts(named)


HYPOTHESIS = ReorderedHypothesis()
