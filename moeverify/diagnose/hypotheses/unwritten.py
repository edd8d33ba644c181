"""Hypothesis: a module reads memory that was allocated and that nothing has written."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Unwritten as UnwrittenOperation
from moeverify.results.trial import Reason


class Unwritten(Hypothesis):
    """Inside the culprit, whose inputs are right, some rank reads what a collective or a copy should have filled.

    What stands in such memory is chance, and of a value that fits by chance nothing else should be said.
    """

    name = "unwritten"
    quantities = frozenset({Quantity.OUTPUT, Quantity.MODULE_GRADIENT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Look for a read inside of the module where it went wrong, in that direction."""
        (tensor,) = tensors
        origin = inputs.origin_of(tensor)
        if origin is None or not inputs.unwritten:
            return self.untried(Reason.MODULES_NOT_COMPARED)
        place = (origin.direction, origin.culprit)
        found = [
            (rank, read)
            for rank, reads in sorted(inputs.unwritten.items())
            for read in reads
            if place in read.inside
        ]
        if not found:
            return self.refuse()
        _, first = found[0]
        alike = (first.allocated_at, first.read_at)
        operation = UnwrittenOperation(
            allocated_at=first.allocated_at,
            read_at=first.read_at,
            shape=first.shape,
            ranks=tuple(rank for rank, read in found if (read.allocated_at, read.read_at) == alike),
        )
        return self.accept(explain_by(Cause.UNWRITTEN, operation, tensors, inputs))


HYPOTHESIS = Unwritten()
