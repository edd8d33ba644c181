"""Hypothesis: from right inputs on, ranks make the same steps as one device but for a few, operator by operator."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.graph.found import Graphs
from moeverify.diagnose.graph.record import CAST
from moeverify.diagnose.hypotheses.altered import chooses_otherwise
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.other_steps import OtherSteps
from moeverify.results.trial import Reason
from moeverify.train.module_taps import BACKWARD, FORWARD


class OtherStepsHypothesis(Hypothesis):
    """The graphs of `moeverify.diagnose.graph`: what ranks have recorded, and what one device has.

    It needs no formula, and names what is in no grammar; so it is asked where these find nothing.
    """

    name = "other_steps"
    quantities = frozenset({Quantity.OUTPUT, Quantity.MODULE_GRADIENT, Quantity.LOSS, Quantity.GRADIENT})

    def applies(self, tensor: WrongTensor, inputs: DiagnosisInputs) -> bool:
        """Return whether it is about this tensor: about a loss or a gradient where modules before it are right."""
        origins = inputs.search.origins if inputs.search is not None else {}
        is_first = {
            Quantity.LOSS: FORWARD not in origins,
            Quantity.GRADIENT: not origins,
        }
        return super().applies(tensor, inputs) and is_first.get(tensor.quantity, True)

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Compare the graphs from the culprit's end on, or from a loss or the gradient of a parameter."""
        (tensor,) = tensors
        graphs = inputs.graphs()
        if graphs is None:
            return self.untried(Reason.NOT_COMPARABLE)
        found = _explain(graphs, tensor, inputs)
        if found is None or _has_cast(found):
            return self.refuse()
        is_forward = tensor.quantity in (Quantity.OUTPUT, Quantity.LOSS)
        cause = Cause.FORWARD if is_forward else Cause.BACKWARD
        if tensor.quantity is Quantity.OUTPUT and chooses_otherwise(tensor, inputs):
            cause = Cause.ROUTING
        return self.accept(explain_by(cause, found, tensors, inputs))


def explain_loss(losses: Sequence[WrongTensor], inputs: DiagnosisInputs) -> OtherSteps | None:
    """Return the steps that are otherwise where a loss is made; None where that is unknown, or of several losses."""
    graphs = inputs.graphs()
    if graphs is None or len(losses) != 1:
        return None
    found = _explain(graphs, losses[0], inputs)
    return None if found is None or _has_cast(found) else found


def _explain(graphs: Graphs, tensor: WrongTensor, inputs: DiagnosisInputs) -> OtherSteps | None:
    if tensor.quantity is Quantity.GRADIENT:
        return graphs.explain_total((BACKWARD, tensor.name, "gradient", "0"))
    if tensor.quantity is Quantity.LOSS:
        return graphs.explain_total((FORWARD, tensor.name, "loss", "0"))
    origin = inputs.origin_of(tensor)
    return None if origin is None else graphs.explain(origin)


def _has_cast(found: OtherSteps) -> bool:
    """Return whether something is cast otherwise: what is rounded says `rounding`, where all of it is."""
    terms = [term for step in found.steps for term in (step.right, step.wrong) if term is not None]
    return any(term.operator == CAST for term in terms)


HYPOTHESIS = OtherStepsHypothesis()
