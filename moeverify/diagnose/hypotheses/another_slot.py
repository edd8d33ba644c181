"""Hypothesis: parameters have each other's values, as where a flat buffer was filled or cut in another way."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.displaced import DisplacedSearch
from moeverify.diagnose.families import split_moment
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Operation, Replaced
from moeverify.results.slots import Displaced
from moeverify.results.trial import Reason


class AnotherSlot(Hypothesis):
    """All values of a tensor, or all that one rank adds to it, are values of other parameters, in runs.

    Which of these are there is asked of all wrong tensors together: a buffer that is cut in another way has them in
    one order.
    """

    name = "another_slot"
    quantities = frozenset(
        {Quantity.GRADIENT, Quantity.UPDATE, Quantity.OPTIMIZER_STATE, Quantity.INITIAL_VALUE}
    )

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Look up its values among those of all parameters."""
        (tensor,) = tensors
        if not inputs.regions:
            return self.untried(Reason.NOT_HELD)
        alike = [each for each in inputs.of_quantity(tensor.quantity) if _is_alike(each, tensor)]
        known = inputs.displaced
        if id(tensor) not in known:
            found = DisplacedSearch(alike or [tensor], inputs).run()
            known.update({id(each): found.get(id(each)) for each in (*alike, tensor)})
        displaced = known[id(tensor)]
        if displaced is None:
            return self.refuse()
        operation = _simplify(displaced)
        is_copy = isinstance(operation, Replaced)
        cause = Cause.DUPLICATE if is_copy else Cause.PERMUTATION
        return self.accept(explain_by(cause, operation, tensors, inputs), about=displaced.source)


def _is_alike(one: WrongTensor, other: WrongTensor) -> bool:
    """Return whether two tensors stand in one buffer: moments of an optimizer have one for each."""
    if one.quantity is not Quantity.OPTIMIZER_STATE:
        return True
    return split_moment(one.name)[1] == split_moment(other.name)[1]


def _simplify(displaced: Displaced) -> Operation:
    """Return that a tensor is a copy of another one, where it is no more than that."""
    if displaced.source and displaced.tokens is None and not displaced.exchanged:
        return Replaced(by="tensor", tensor=displaced.source, ranks=displaced.ranks)
    return displaced


HYPOTHESIS = AnotherSlot()
