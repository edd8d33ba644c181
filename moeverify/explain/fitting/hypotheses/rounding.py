"""Hypothesis: the values are right up to the rounding of a narrower dtype than the recipe's.

A norm alone does not identify rounding: a bug in few elements, or an added low-rank term, can have any
norm. The test therefore has these conditions:

- Nearly all elements are off by a share of the average error.
- No tensor, and not all tensors together, are a multiple of the right one beyond the standard error that
  rounding leaves in such a factor.
- At the module where the error begins, it has the size of rounding, and the errors of its tokens have no
  common direction: their singular values are similar.

A number rounded to a dtype with p bits of significand is off by up to 2^-p of itself: 2^-24 for float32,
2^-8 for bfloat16. A tensor of such numbers is off by about that in the Frobenius norm: less if errors of
many terms average out, more if terms cancel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, Scope, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.noisy_fit import fit_noisy
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.observation import RelativeError
from moeverify.results.operation import Rounded
from moeverify.train.module_taps import BACKWARD
from moeverify.verification.checks.narrower import list_narrower, name_dtype

# The narrowest first: float32 can represent every bfloat16 number.
_UNITS = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
_WINDOW = (0.01, 8.0)  # errors of sums and products of rounded numbers, in units of rounding
_LEAST_DIRECTIONS = 8  # fewer tokens or elements have no meaningful spectrum
_OF_MODULES = (Quantity.OUTPUT, Quantity.MODULE_GRADIENT, Quantity.GRADIENT)
_SHARE = 0.9  # of the tensors: where terms cancel, rounding may be more
_DENSE = 0.9  # of the elements that are not zero must be off: rounding leaves few numbers exact
_OFF = 0.05  # of the average relative error of the elements: one in thirty has less
_WHITE = 0.05  # median / largest singular value of the errors: 0.3 for noise, 0 for a sum of few terms
_LEAST_SIGNS, _BALANCE = (
    256,
    0.1,
)  # elements, and the least share of them that rounding makes larger, or smaller
_ALONG = 0.99  # cosine of an error with the values themselves
_LEAST_ANGLE = 8  # elements; with fewer, the angle is not meaningful
_LARGEST = 0.05  # relative error above which representable values are not the rounded golden


class Rounding(Hypothesis):
    """All values are representable in a narrower dtype, or errors have its size and no direction."""

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
        for dtype, unit in _UNITS.items():
            if any(tensor.precision.itemsize <= dtype.itemsize for tensor, _ in errors):
                continue  # the recipe's own precision is not narrower
            is_narrow = all(error < _LARGEST and is_representable(tensor, dtype) for tensor, error in errors)
            # A buffer may be an average, whose error has any size and no direction.
            is_average = tensors[0].quantity is Quantity.BUFFER
            if is_narrow or (
                not is_average
                and _have_size_of(unit, errors)
                and all(_is_dense(tensor) for tensor, _ in errors)
                and _has_no_factor([tensor for tensor, _ in errors], unit)
                and _began_as_noise(tensors, inputs, unit)
            ):
                operation = Rounded(dtype=name_dtype(dtype), is_representable=is_narrow)
                return self.accept(explain_by(Cause.ROUNDING, operation, tensors, inputs), seen)
        return None

    def _test_cast(
        self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs, seen: RelativeError
    ) -> Outcome | None:
        """Compare loaded values with a cast of the saved ones, bit for bit: a load computes nothing."""
        for dtype in list_narrower(*(tensor.precision for tensor in tensors)):
            if all(_is_cast(tensor, dtype) for tensor in tensors):
                operation = Rounded(dtype=name_dtype(dtype), is_representable=True)
                return self.accept(explain_by(Cause.ROUNDING, operation, tensors, inputs), seen)
        return None


def _is_cast(tensor: WrongTensor, dtype: torch.dtype) -> bool:
    return torch.equal(tensor.expected.to(dtype).to(tensor.whole.dtype), tensor.whole)


def measure_error(tensor: WrongTensor) -> float:
    """Return the relative error in the Frobenius norm; 0 if the golden is zero."""
    norm = float(tensor.expected.norm())
    return float((tensor.whole - tensor.expected).norm()) / norm if norm else 0.0


def is_representable(tensor: WrongTensor, dtype: torch.dtype) -> bool:
    """Return whether a narrower dtype can represent all values on the ranks."""
    return torch.equal(tensor.whole.to(dtype).to(tensor.whole.dtype), tensor.whole)


def _have_size_of(unit: float, errors: Sequence[tuple[WrongTensor, float]]) -> bool:
    """Return whether nearly all errors are of the size of rounding, spread over elements, and undirected."""
    inside = [_is_of_size(error, unit) for _, error in errors]
    loose = [_is_unstructured(tensor, error, unit) for tensor, error in errors]
    spread = [_is_spread(tensor, error) for tensor, error in errors]
    return min(sum(inside), sum(loose), sum(spread)) >= _SHARE * len(errors)


def _is_of_size(error: float, unit: float) -> bool:
    return _WINDOW[0] * unit < error < _WINDOW[1] * unit


def _is_dense(tensor: WrongTensor) -> bool:
    """Return whether nearly all elements that are not zero in the golden are off."""
    return float((_list_off(tensor) > 0.0).double().mean()) >= _DENSE


def _is_spread(tensor: WrongTensor, error: float) -> bool:
    """Return whether nearly all elements are off by a share of the error, unlike after a sparse bug."""
    is_off = _list_off(tensor) > _OFF * error
    # With few elements, chance reduces the share: allow three standard deviations.
    least = _DENSE - 3.0 * math.sqrt(_DENSE * (1.0 - _DENSE) / max(len(is_off), 1))
    return float(is_off.double().mean()) >= least


def _list_off(tensor: WrongTensor) -> Tensor:
    """Return the relative error (n) of each element that is not zero in the golden."""
    expected = tensor.expected.reshape(-1)
    off = (tensor.whole.reshape(-1) - expected).abs()
    held = expected != 0.0
    return off[held] / expected[held].abs()


def _has_no_factor(tensors: Sequence[WrongTensor], unit: float) -> bool:
    """Return whether the common factor of all tensors is 1 within the standard error of rounding.

    All tensors have equal weight: with few elements a standard error is an estimate, and weighting by it
    would favor estimates that are too small.
    """
    factors = [fit_noisy(tensor.whole, tensor.expected, unit) for tensor in tensors]
    known = [factor for factor in factors if factor is not None]
    if not known:
        return True
    mean = sum(factor.value for factor in known) / len(known)
    spread = math.sqrt(sum(factor.spread**2 for factor in known)) / len(known)
    # Rounding that moves all tensors alike does not average out.
    return replace(known[0], value=mean, spread=max(spread, min(each.spread for each in known) / 2.0)).agrees(
        1.0
    )


def _began_as_noise(tensors: Sequence[WrongTensor], inputs: DiagnosisInputs, unit: float) -> bool:
    """Return whether the errors at the module where they begin have no direction; true if it is unknown.

    Readings (rows, positions, width) are viewed as (tokens, width).
    """
    origins = [inputs.origin_of(tensor) for tensor in tensors]
    found = origins[0] or inputs.origins.get(BACKWARD)
    if tensors[0].quantity not in _OF_MODULES or found is None:
        return True
    # Rounding has the same size everywhere, but results of a module may have smaller errors than the
    # module.
    began = measure_error(found.tensor)
    if began and not (_is_of_size(began, unit) and _is_spread(found.tensor, began)):
        return False
    error = (found.tensor.whole - found.tensor.expected).flatten(0, -2)
    # Rounding increases about as many numbers as it decreases.
    moved = (error * found.tensor.expected.flatten(0, -2)).flatten()
    moved = moved[moved != 0.0]
    larger = float((moved > 0.0).double().mean()) if len(moved) >= _LEAST_SIGNS else 0.5
    if not _BALANCE < larger < 1.0 - _BALANCE:
        return False
    scale = found.tensor.expected.flatten(0, -2).norm(dim=1, keepdim=True)
    rows = (error / scale.clamp(min=1e-300))[scale.squeeze(1) > 0.0]
    if min(rows.shape) < _LEAST_DIRECTIONS:
        return True
    if _are_multiples(rows, found.tensor.expected.flatten(0, -2)[scale.squeeze(1) > 0.0]):
        # One number of each token, such as the divisor of a norm, was rounded, by at most one unit.
        return float(rows.norm(dim=1).max()) <= unit
    values = torch.linalg.svdvals(rows)
    return float(values.median()) > _WHITE * float(values[0])


def _are_multiples(errors: Tensor, expected: Tensor) -> bool:
    """Return whether most rows (n, width) of the errors are parallel to the expected values."""
    along = (errors * expected).sum(dim=1).abs()
    return float((along / (errors.norm(dim=1) * expected.norm(dim=1)).clamp(min=1e-300)).median()) > _ALONG


def _is_unstructured(tensor: WrongTensor, error: float, unit: float) -> bool:
    """Return whether the error is nearly orthogonal to the golden, as rounding up and down is.

    A wrong factor is parallel to the golden: |<error, golden>| / |golden|^2 is then the whole relative
    error. It may be as large as its standard error. With fewer than 8 elements, the angle is not
    meaningful.
    """
    expected = tensor.expected.reshape(-1)
    difference = tensor.whole.reshape(-1) - expected
    norm = float(expected.norm())
    along = abs(float(torch.dot(difference, expected))) / max(norm * norm, 1e-300)
    if len(expected) < _LEAST_ANGLE:
        return True
    factor = fit_noisy(tensor.whole, tensor.expected, unit)
    return along < 0.5 * error and (factor is None or factor.agrees(1.0))


HYPOTHESIS = Rounding()
