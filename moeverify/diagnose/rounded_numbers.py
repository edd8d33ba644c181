"""Single numbers that were rounded to a narrower dtype: factors near 1 that rounding makes of a known number.

A tensor that is rounded has errors of all directions. A number that is rounded, such as the weight of a loss or the
coefficient of a clip, scales all that is multiplied by it alike: by 1.00000005, as a float32 of 0.001 does. And a
number that is reported has fewer bits than one of the recipe's precision. Both are exact, so that no measured factor
near 1 is taken for a rounding by its size alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moeverify.case.schema import ReferenceModel
from moeverify.diagnose.engine import DiagnosedCause
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.factor import Factor, RoundedNumber
from moeverify.results.operation import Scaled

_DTYPES: Mapping[str, tuple[torch.dtype, int]] = {
    "bfloat16": (torch.bfloat16, 8),
    "float16": (torch.float16, 11),
    "float32": (torch.float32, 24),
}
"""Narrower dtypes with the bits of their significands, the narrowest first."""

_MORE_BITS = 4  # a sum of a few rounded numbers of like size has so many more at most
_NEAR = 2.0**-7  # of 1: rounding to any of these dtypes makes no more of a number
_EXACT = 1e-11  # how well a fit in float64 knows a factor
_UNITS = 2.0**-50  # of a quotient of numbers in float64
_REPORTED = (Quantity.LOSS, Quantity.GRADIENT_NORM, Quantity.CLIP_COEFFICIENT)


def list_numbers(model: ReferenceModel | None, clip: Tensor | None, valid: Tensor | None) -> dict[str, float]:
    """Return the numbers by which losses and gradients are multiplied.

    They are the weights of losses, one over the valid tokens (B, S), and the coefficient of a clip.
    """
    found = {} if clip is None else {"clip": float(clip)}
    if valid is not None and bool(valid.any()):
        found["valid"] = 1.0 / float(valid.sum())
    if model is not None and model.moe is not None:
        found |= {"balance": model.moe.balance_coef, "z": model.moe.z_coef}
        # What the gradient of a sum over tokens begins with.
        found["z-valid"] = model.moe.z_coef * found.get("valid", 0.0)
    return {name: number for name, number in found.items() if number}


def name_rounded(cause: DiagnosedCause, inputs: DiagnosisInputs) -> DiagnosedCause:
    """Return a cause with the number that was rounded, for each factor near 1 that one explains."""
    explanation, subject = cause.explanation, cause.subject
    if explanation is None or subject is None or subject.precision != torch.float64:
        return cause
    operation = explanation.operation
    if not isinstance(operation, Scaled):
        return cause
    contributions = tuple(
        each.model_copy(update={"factor": _name(each.factor, explanation, subject, inputs)})
        for each in operation.contributions
    )
    named = operation.model_copy(update={"contributions": contributions})
    return replace(cause, explanation=explanation.model_copy(update={"operation": named}))


def _name(factor: Factor, explanation: Explanation, tensor: WrongTensor, inputs: DiagnosisInputs) -> Factor:
    if factor.equals or not 0.0 < abs(factor.value - 1.0) < _NEAR:
        return factor
    if explanation.subject.quantity in _REPORTED and tensor.expected.numel() == 1:
        found = _read_reported(float(tensor.whole), float(tensor.expected), inputs.numbers)
    else:
        sizes = [1, *(source.size for source in inputs.axes.sources)]
        found = _find_rounded(factor.value, inputs.numbers, sizes)
    return factor if found is None else factor.model_copy(update={"rounded": found})


def _find_rounded(factor: float, numbers: Mapping[str, float], sizes: Sequence[int]) -> RoundedNumber | None:
    """Return the number whose rounded value is this many times itself; it may be a multiple that was rounded."""
    for name, number in numbers.items():
        for size in sizes:
            for dtype, (kind, _) in _DTYPES.items():
                value = number * size
                if value and abs(_round(value, kind) / value - factor) <= _EXACT and factor != 1.0:
                    return RoundedNumber(name=name, dtypes=(dtype,))
    return None


def _read_reported(actual: float, expected: float, numbers: Mapping[str, float]) -> RoundedNumber | None:
    """Return the narrower dtype of which a reported number is, or a few of which it sums up."""
    error, parts = abs(actual / expected - 1.0), list(_list_parts(actual, expected, numbers))
    found = [
        dtype
        for dtype, (_, bits) in _DTYPES.items()
        if error <= 2.0**-bits
        and any(
            _has_bits(each, bits + _MORE_BITS) > _has_bits(right, bits + _MORE_BITS) for each, right in parts
        )
    ]
    # Where the error is small by luck a wider dtype may have made it too.
    return RoundedNumber(dtypes=tuple(found)) if found else None


def _list_parts(
    actual: float, expected: float, numbers: Mapping[str, float]
) -> Iterator[tuple[float, float]]:
    """Yield a number, its square if it is a root, what is left without a known number, each beside the right one."""
    yield actual, expected
    yield actual * actual, expected * expected
    yield from ((actual / number, expected / number) for number in numbers.values() if number)


def _has_bits(value: float, bits: int) -> bool:
    """Return whether a number has at most so many bits, but for rounding of float64."""
    fraction, _ = math.frexp(value)
    scaled = fraction * 2.0**bits
    return abs(scaled - round(scaled)) <= _UNITS * abs(scaled)


def _round(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(dtype))
