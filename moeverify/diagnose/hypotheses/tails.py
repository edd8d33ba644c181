"""Hypothesis: the largest initial values are others, as of a truncated distribution, and all others are right."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, Scope, explain_by
from moeverify.diagnose.hypotheses.drawn import is_common
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.tails import find_tails
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.initial_values import Drawn


class TailsHypothesis(Hypothesis):
    """All weights together, whatever ranks have them: what is beyond one bound is cut off, drawn again, or zero."""

    name = "tails"
    quantities = frozenset({Quantity.INITIAL_VALUE})

    own_scopes = (Scope.TOGETHER,)
    """All that is wrong, of which a small weight alone tells little."""

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Compare the elements that are wrong with the largest ones."""
        tails = find_tails(tensors) if all(map(is_common, tensors)) else None
        if tails is None:
            return self.refuse()
        return self.accept(explain_by(Cause.INITIALIZATION, Drawn(tails=tails), tensors, inputs))


HYPOTHESIS = TailsHypothesis()
