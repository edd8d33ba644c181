"""Hypothesis: on right inputs, a module has the very output of its formula with a part or two otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.replay.experts import ExpertsFormula
from moeverify.diagnose.replay.language import Found, NamedFormula, find_variant
from moeverify.diagnose.replay.multiples import name_multiple
from moeverify.diagnose.replay.shards import SUM
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.change import Change
from moeverify.results.explanation import Quantity
from moeverify.results.observation import Replay
from moeverify.results.operation import Varied
from moeverify.results.trial import Reason

_UNREDUCED = (("slices", "own"), (SUM, "own"))


class Replayed(Hypothesis):
    """The variants of `moeverify.diagnose.replay`, evaluated on one device on the golden's inputs.

    A variant must give what every wrong rank has, to rounding; few others may give it too. On ranks that are right it
    must change nothing, or the ranks that are wrong are named.
    """

    name = "replayed"
    quantities = frozenset({Quantity.OUTPUT, Quantity.MODULE_GRADIENT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Search the variants of the culprit's formula."""
        (tensor,) = tensors
        origin = inputs.origin_of(tensor)
        # Hypotheses that only measure a factor ask too, and the log of trials does.
        if id(tensor) not in inputs.searched:
            inputs.searched[id(tensor)] = self._search(tensor, inputs)
        searched = inputs.searched[id(tensor)]
        if searched is None or searched[1] is None:
            return self.untried(Reason.NOT_COMPARABLE)
        named, found = searched[0], searched[1]
        # Nothing at all comes of many a mistake with rows, and is no evidence for any.
        is_nothing = isinstance(named.formula, ExpertsFormula) and not bool(tensor.whole.any())
        if not found.variants or is_nothing:
            return self.refuse(Replay(formula=named.name, num_tried=found.num_tried))
        seen = Replay(formula=named.name, num_tried=found.num_tried, residual=found.residual)
        assert origin is not None
        variants = tuple(
            tuple(name_multiple(change, origin, inputs) for change in changes) for changes in found.variants
        )
        operation = Varied(
            formula=named.name, variants=variants, ranks=found.ranks, blocks=found.blocks, tokens=found.tokens
        )
        cause = _find_cause(found.variants[0], tensor)
        explanation = explain_by(cause, operation, tensors, inputs, residual=found.residual)
        return self.accept(explanation, seen)

    def _search(
        self, tensor: WrongTensor, inputs: DiagnosisInputs
    ) -> tuple[NamedFormula, Found | None] | None:
        origin = inputs.origin_of(tensor)
        named = inputs.formula(origin) if origin is not None else None
        if named is None or inputs.search is None:
            return None
        return named, find_variant(named.formula, tensor, inputs.search.bound)


def _find_cause(changes: Sequence[Change], tensor: WrongTensor) -> Cause:
    """Return that a sum over slices is missing, where each rank has its own alone; else where it goes wrong."""
    if any((change.part, change.way) in _UNREDUCED for change in changes):
        return Cause.MISSING_REDUCTION
    return Cause.FORWARD if tensor.quantity is Quantity.OUTPUT else Cause.BACKWARD


HYPOTHESIS = Replayed()
