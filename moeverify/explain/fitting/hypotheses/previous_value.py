"""Hypothesis: the tensor has its value of another time, the previous step or the start."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import STEP_BEFORE, DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import EXACT, WrongTensor, measure_distance
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.observation import Distance
from moeverify.results.operation import Replaced, Unmoved
from moeverify.results.trial import Reason, Trial


class PreviousValue(Hypothesis):
    """Nothing was accumulated or counted, the step changed no state, or a checkpoint has an older state."""

    name = "previous_value"
    quantities = frozenset(
        {
            Quantity.GRADIENT,
            Quantity.ROUTING_COUNT,
            Quantity.BUFFER,
            Quantity.OPTIMIZER_STATE,
            Quantity.LOADED,
        }
    )

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Compare with the golden's values at other times."""
        (tensor,) = tensors
        trials = tuple(self._try(tensor, time, value) for time, value in inputs.earlier(tensor.key).items())
        is_old = any(trial.verdict == "yes" and trial.about == STEP_BEFORE for trial in trials)
        return Outcome(trials, self._explain(tensor, inputs) if is_old else None)

    def _try(self, tensor: WrongTensor, time: str, value: Tensor | None) -> Trial:
        reason = None
        if value is None or value.numel() != tensor.expected.numel():
            reason = Reason.NO_EARLIER_VALUE
        else:
            error, right = measure_distance(tensor, value)
            if right >= EXACT:
                return Trial(
                    hypothesis=self.name,
                    about=time,
                    verdict="yes" if error < EXACT else "no",
                    residual=error,
                    observations=(Distance(error=error),),
                )
            reason = Reason.EARLIER_IS_RIGHT
        return Trial(hypothesis=self.name, about=time, verdict="untried", reason=reason)

    def _explain(self, tensor: WrongTensor, inputs: DiagnosisInputs) -> Explanation:
        if tensor.quantity is Quantity.LOADED:
            return explain_by(Cause.STATE, Replaced(by="step-before"), [tensor], inputs)
        if tensor.quantity in (Quantity.GRADIENT, Quantity.ROUTING_COUNT):
            return explain_by(Cause.STALE, Replaced(by="step-before"), [tensor], inputs)
        return explain_by(Cause.STALE, Unmoved(), [tensor], inputs)


HYPOTHESIS = PreviousValue()
