"""Hypothesis: all values are ones of a narrower dtype than the recipe's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, Scope, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.observation import RelativeError
from moeverify.results.operation import Rounded
from moeverify.verification.checks.narrower import list_narrower, name_dtype

# The narrowest first: float32 can represent every bfloat16 number.
_UNITS = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
_LARGEST = 0.05  # relative error above which representable values are not the rounded golden


class Rounding(Hypothesis):
    """All values are representable in a narrower dtype, and near the golden."""

    name = "rounding"
    quantities = frozenset(
        {
            Quantity.INITIAL_VALUE,
            Quantity.OUTPUT,
            Quantity.GRADIENT,
            Quantity.MODULE_GRADIENT,
            Quantity.UPDATE,
            Quantity.OPTIMIZER_STATE,
            Quantity.BUFFER,
            Quantity.TENSOR,
            Quantity.LOADED,
        }
    )

    def scopes(self, quantity: Quantity) -> tuple[Scope, ...]:
        """Return the widest scope for gradients: a single one may look like rounding by chance."""
        return (Scope.TOGETHER,) if quantity is Quantity.GRADIENT else (Scope.ALONE,)

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Test the narrower dtypes."""
        errors = [(tensor, error) for tensor in tensors if (error := measure_error(tensor)) > 0.0]
        if not errors:
            return None
        units = {name_dtype(dtype): unit for dtype, unit in _UNITS.items()}
        seen = RelativeError(error=max(error for _, error in errors), units=units)
        if tensors[0].quantity is Quantity.LOADED:
            return self._test_cast(tensors, inputs, seen)
        for dtype in _UNITS:
            if any(tensor.precision.itemsize <= dtype.itemsize for tensor, _ in errors):
                continue  # the recipe's own precision is not narrower
            if all(error < _LARGEST and is_representable(tensor, dtype) for tensor, error in errors):
                return self._accept(dtype, tensors, inputs, seen)
        return None

    def _test_cast(
        self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs, seen: RelativeError
    ) -> Outcome | None:
        """Compare loaded values with a cast of the saved ones, bit for bit: a load computes nothing."""
        for dtype in list_narrower(*(tensor.precision for tensor in tensors)):
            if all(_is_cast(tensor, dtype) for tensor in tensors):
                return self._accept(dtype, tensors, inputs, seen)
        return None

    def _accept(
        self,
        dtype: torch.dtype,
        tensors: Sequence[WrongTensor],
        inputs: DiagnosisInputs,
        seen: RelativeError,
    ) -> Outcome:
        operation = Rounded(dtype=name_dtype(dtype))
        return self.accept(explain_by(Cause.ROUNDING, operation, tensors, inputs), seen)


def _is_cast(tensor: WrongTensor, dtype: torch.dtype) -> bool:
    return torch.equal(tensor.expected.to(dtype).to(tensor.whole.dtype), tensor.whole)


def measure_error(tensor: WrongTensor) -> float:
    """Return the relative error in the Frobenius norm; 0 if the golden is zero."""
    norm = float(tensor.expected.norm())
    return float((tensor.whole - tensor.expected).norm()) / norm if norm else 0.0


def is_representable(tensor: WrongTensor, dtype: torch.dtype) -> bool:
    """Return whether a narrower dtype can represent all values on the ranks."""
    return torch.equal(tensor.whole.to(dtype).to(tensor.whole.dtype), tensor.whole)


HYPOTHESIS = Rounding()
