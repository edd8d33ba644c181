"""Values that are right up to the rounding of a lower precision than the recipe's."""

from __future__ import annotations

import torch
from torch import Tensor

from moeverify.diagnose.cause import Cause
from moeverify.diagnose.evidence import Suspect
from moeverify.diagnose.verdict import Verdict

_DTYPES = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def examine_rounding(suspect: Suspect) -> Verdict | None:
    """Return a verdict if every value can be written in a lower precision, or the errors have its size.

    Rounding errors are small against every element and point nowhere: the scale stays 1 to second order.
    """
    expected, actual = suspect.expected, suspect.whole()
    norm = float(expected.norm())
    error = float((actual - expected).norm()) / norm if norm else 0.0
    if not 0.0 < error < 0.05:
        return None
    stored = [piece.local.dtype for piece in suspect.pieces if piece.local is not None]
    for dtype, unit in _DTYPES.items():
        if all(known.itemsize <= dtype.itemsize for known in stored):
            continue  # the recipe's own precision is no lower one
        if torch.equal(actual.to(dtype).to(actual.dtype), actual):
            text = (
                f"every value can be written in {_name(dtype)}, which the golden's cannot; error {error:.2g}"
            )
            return Verdict(Cause.ROUNDING, text, evidence=(text,))
        if 0.05 * unit < error < 8 * unit and _is_unstructured(expected, actual, error):
            text = f"errors of {error:.2g} in no direction: the rounding of {_name(dtype)}"
            return Verdict(Cause.ROUNDING, text, evidence=(text,))
    return None


def _is_unstructured(expected: Tensor, actual: Tensor, error: float) -> bool:
    """Return whether the error is nearly orthogonal to the golden and spread over many elements."""
    difference = (actual - expected).reshape(-1)
    along = float(torch.dot(difference, expected.reshape(-1))) / float(expected.norm()) ** 2
    spread = int((difference.abs() > 0.01 * difference.abs().max()).sum())
    return abs(along) < 0.3 * error and spread > 0.2 * difference.numel()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
