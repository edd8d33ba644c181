"""Least squares of wrong tensors on parts of their goldens, to find the linear combination that was computed.

The parts c_i have the shape of the golden and add up to it. A wrong sum is `actual = sum_i k_i * c_i`, so
the error is `sum_i (k_i - 1) * c_i`. The fit uses the error, not the tensor: a term that is 1e-5 of the
gradient would drown in the tensor, but it makes up all of its own error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.part import Part

Column = tuple[Part, Callable[[str], Tensor]]  # a part, and: parameter name -> this part of its gradient

EXPLAINED = 1e-3
"""Largest share of the error that may remain; rounding leaves 1e-5 of the smallest detected error."""


NEAR = 1e-2
"""Largest distance of a coefficient from a candidate number, relative to max(1, |number|)."""

_ALIKE = 1.2
"""Largest ratio of the squared residuals of candidate numbers and of the fitted coefficients."""

_CHANCE = 4.0
"""Additional allowance for each coefficient, in units of the residual mean square, for chance."""


@dataclass(frozen=True)
class Fit:
    """Best-fitting coefficients of parts.

    The golden has coefficient 1 for each of its parts. `residual` is the share of the error that remains in
    the tensor that is explained worst. `measure` returns the sum of squared residuals of `count` numbers
    for given coefficients.
    """

    parts: tuple[Part, ...]
    coefficients: tuple[float, ...]
    residual: float
    measure: Callable[[Sequence[float]], float]
    count: int

    @property
    def explains(self) -> bool:
        """Return whether only rounding remains of the errors."""
        return self.residual < EXPLAINED

    def settle(self, numbers: Sequence[float]) -> Fit:
        """Return the fit with coefficients replaced by candidate numbers that fit equally well.

        Rounding limits the precision of a coefficient: ten digits in float64, and fewer in float32 for
        small parts of the gradient. If the errors cannot distinguish a coefficient from one of `numbers`,
        the coefficient becomes that number.
        """
        settled, free = list(self.coefficients), len(self.coefficients)
        allowed = self.measure(settled) * max(_ALIKE, 1.0 + _CHANCE * free / (self.count - free))
        for place, value in enumerate(self.coefficients):
            near = {number for number in numbers if abs(value - number) <= NEAR * max(1.0, abs(number))}
            tried = [[*settled[:place], number, *settled[place + 1 :]] for number in near]
            # Several numbers may be near, such as 0 and 1 / tokens. The errors usually separate them; if
            # not, keep the fit.
            right = [each for each in tried if self.measure(each) <= allowed]
            if len(right) == 1:
                (settled,) = right
        return replace(self, coefficients=tuple(settled))


def fit_columns(tensors: Sequence[WrongTensor], columns: Sequence[Column]) -> Fit | None:
    """Fit the errors of some tensors together. Return None if the fit would prove nothing.

    Each error is scaled to norm 1, so that a small error in a large tensor weighs as much as a large one.
    The fit needs at least twice as many numbers as coefficients, and finite errors. Parts that are zero in
    all tensors get no coefficient.

    Shapes: the concatenated errors (numbers,) are fitted on (numbers, columns).
    """
    errors = [(tensor.whole - tensor.expected).reshape(-1) for tensor in tensors]
    norms = [float(error.norm()) or 1.0 for error in errors]
    target = torch.cat([error / norm for error, norm in zip(errors, norms, strict=True)])
    if not bool(torch.isfinite(target).all()):
        return None
    stacked = [
        torch.cat([part(tensor.name).reshape(-1) / norm for tensor, norm in zip(tensors, norms, strict=True)])
        for _, part in columns
    ]
    lengths = [float(part.norm()) for part in stacked]
    used = [number for number, length in enumerate(lengths) if length > 1e-12 * max(lengths)]
    if not used or len(target) < 2 * len(used):
        return None
    # Scale columns to norm 1: terms differ by 1e5 (lm 1, z 1e-5), and the solver cuts off small columns.
    matrix = torch.stack([stacked[number] / lengths[number] for number in used], dim=1)
    solution = torch.linalg.lstsq(matrix, target.unsqueeze(1), driver="gelsd").solution
    parts = tuple(columns[number][0] for number in used)
    sizes = [len(error) for error in errors]
    scales = [lengths[number] for number in used]

    def leave(found: Tensor) -> Tensor:
        return (matrix @ found - target.unsqueeze(1)).squeeze(1)

    def measure(coefficients: Sequence[float]) -> float:
        # The golden contains every part once.
        off = [(value - 1.0) * scale for value, scale in zip(coefficients, scales, strict=True)]
        left = leave(torch.tensor(off, dtype=matrix.dtype, device=matrix.device).unsqueeze(1))
        return float(left.square().sum())

    off = [float(value) / scale for value, scale in zip(solution, scales, strict=True)]
    found = tuple(1.0 + value for value in off)
    residual = max(float(part.norm()) for part in torch.split(leave(solution), sizes))
    return Fit(parts, found, residual, measure, len(target))
