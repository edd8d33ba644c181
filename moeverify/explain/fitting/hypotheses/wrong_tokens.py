"""Hypothesis: a module is wrong only at padding tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.observation import WrongElements
from moeverify.results.operation import Altered
from moeverify.results.part import Tokens
from moeverify.results.trial import Reason

_RIGHT = 1e-9  # of the largest token; a larger error is wrong, as in the search for the first divergence


class WrongTokens(Hypothesis):
    """All wrong tokens are padding, and all valid tokens are right."""

    name = "wrong_tokens"
    quantities = frozenset({Quantity.OUTPUT, Quantity.MODULE_GRADIENT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Compare the wrong tokens (B, S) with the padding."""
        (tensor,) = tensors
        if inputs.valid is None or tensor.expected.ndim < 3 or tensor.precision != torch.float64:
            return self.untried(Reason.NOT_COMPARABLE)
        if tuple(tensor.expected.shape[:2]) != tuple(inputs.valid.shape):
            return self.untried(Reason.NOT_COMPARABLE)
        error = (tensor.whole - tensor.expected).flatten(2).norm(dim=-1)
        wrong = error > _RIGHT * float(tensor.expected.flatten(2).norm(dim=-1).max())
        seen = WrongElements(num_wrong=int(wrong.sum()), num_elements=wrong.numel())
        if not bool(wrong.any()) or bool((wrong & inputs.valid).any()):
            return self.refuse(seen)
        operation = Altered(tokens=Tokens(padding=True))
        return self.accept(explain_by(Cause.PADDING, operation, tensors, inputs), seen)


HYPOTHESIS = WrongTokens()
