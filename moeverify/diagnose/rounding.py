"""Values that are right up to the rounding of a lower precision than the recipe's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.diagnose.evidence import Suspect
from moeverify.diagnose.verdict import Verdict
from moeverify.results.cause import Cause

_UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
_WINDOW = (0.01, 8.0)  # errors of sums and products of rounded numbers, in units of rounding
_SHARE = 0.9  # of the tensors: where terms cancel, rounding may be more


def examine_rounding(suspects: Sequence[Suspect]) -> Verdict | None:
    """Return a verdict if the errors of all these tensors together look like rounding.

    Either every value can be written in a lower precision, which those of the golden cannot, or nearly all
    errors have the size of its rounding and point nowhere.
    """
    cases = [(suspect, error) for suspect in suspects if (error := _error(suspect)) > 0.0]
    if not cases:
        return None
    for dtype, unit in _UNITS.items():
        if any(suspect.precision.itemsize <= dtype.itemsize for suspect, _ in cases):
            continue  # the recipe's own precision is no lower one
        name = str(dtype).removeprefix("torch.")
        if all(error < 0.05 and _can_be_written(suspect.whole(), dtype) for suspect, error in cases):
            text = f"every value can be written in {name}, which the golden's cannot"
            return Verdict(Cause.ROUNDING, text, evidence=(f"relative errors up to {_largest(cases):.2g}",))
        inside = [_WINDOW[0] * unit < error < _WINDOW[1] * unit for _, error in cases]
        loose = [_is_unstructured(suspect) for suspect, _ in cases]
        if sum(inside) >= _SHARE * len(cases) and sum(loose) >= _SHARE * len(cases):
            text = f"errors of the size of {name}'s rounding, in no direction"
            return Verdict(Cause.ROUNDING, text, evidence=(f"relative errors up to {_largest(cases):.2g}",))
    return None


def describe_rounding(suspect: Suspect) -> str:
    """Return why the error of a tensor is not rounding."""
    units = ", ".join(f"{str(dtype)[6:]} {unit:.2g}" for dtype, unit in _UNITS.items())
    return f"the relative error is {_error(suspect):.3g}; units of rounding: {units}"


def _error(suspect: Suspect) -> float:
    norm = float(suspect.expected.norm())
    return float((suspect.whole() - suspect.expected).norm()) / norm if norm else 0.0


def _largest(cases: Sequence[tuple[Suspect, float]]) -> float:
    return max(error for _, error in cases)


def _can_be_written(actual: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(actual.to(dtype).to(actual.dtype), actual)


def _is_unstructured(suspect: Suspect) -> bool:
    """Return whether the error is nearly orthogonal to the golden."""
    expected = suspect.expected.reshape(-1)
    difference = suspect.whole().reshape(-1) - expected
    norm = float(expected.norm())
    along = abs(float(torch.dot(difference, expected))) / max(norm * norm, 1e-300)
    return along < 0.5 * _error(suspect) or len(expected) < 8
