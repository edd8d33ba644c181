"""Hypothesis: right values are in a wrong order, after a wrong reshape, transpose or chunk order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.layouts.levels import Counts, Level, list_parameter_levels, list_token_levels
from moeverify.explain.fitting.layouts.search import OrderSearch
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.layout import DimName, Reordered
from moeverify.results.observation import TriedOrders

_OF_MODULES = (Quantity.OUTPUT, Quantity.MODULE_GRADIENT)
_OF_KEYS, _OF_EXPERTS = (".k_", ".v_", ".key", ".value"), ".experts."


class ReorderedHypothesis(Hypothesis):
    """One order of the grammar of layouts explains all places, on all ranks or on the wrong ones.

    Other orders that result in the same tensor are reported in addition.
    """

    name = "reordered"
    quantities = frozenset(
        {
            *_OF_MODULES,
            Quantity.INITIAL_VALUE,
            Quantity.GRADIENT,
            Quantity.UPDATE,
            Quantity.LOADED,
            Quantity.TENSOR,
        }
    )

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Test the orders of each rank's values, of groups of ranks, and of the whole tensor."""
        (tensor,) = tensors
        search = OrderSearch(tensor)
        found = search.run(_list_levels(tensor, inputs))
        if found is None:
            return None
        seen = TriedOrders(num_tried=search.num_tried, num_giving=len(found.orders))
        where = found.where
        operation = Reordered(
            scope=found.scope, orders=found.orders, ranks=where.ranks, micro_batches=where.micro_batches
        )
        is_copy = found.orders[0].way == "same" and tensor.quantity not in _OF_MODULES
        cause = Cause.DUPLICATE if is_copy else Cause.PERMUTATION
        return self.accept(explain_by(cause, operation, (tensor,), inputs), seen)


def _list_levels(tensor: WrongTensor, inputs: DiagnosisInputs) -> Iterator[Level]:
    groups = inputs.groups_of(tensor)
    degrees = tuple(dict.fromkeys(len(members[0]) for members in groups.values()))
    if tensor.quantity in _OF_MODULES:
        origin = inputs.origin_of(tensor)
        name = tensor.name if origin is None else origin.culprit or origin.module
    else:
        name = tensor.name
    sizes = {source.name: source.size for source in inputs.axes.counts_of(name)}
    is_of_keys = any(part in name for part in _OF_KEYS)
    heads: DimName = "key-value heads" if is_of_keys else "heads"
    kinds: Sequence[DimName] = (heads, "experts") if _OF_EXPERTS in name else (heads,)
    named: Mapping[DimName, int] = {each: sizes[each] for each in kinds if each in sizes}
    counts = Counts(named, degrees)
    if tensor.quantity in _OF_MODULES:
        return list_token_levels(tensor, groups, counts)
    return list_parameter_levels(tensor, counts)


HYPOTHESIS = ReorderedHypothesis()
