"""Least squares of wrong tensors on parts of their goldens: which linear combination of them was computed.

With parts c_i (each a tensor of the golden's shape, all of them together the golden) a wrong sum is
`actual = sum_i k_i * c_i`, so the error is `sum_i (k_i - 1) * c_i`. The error is fitted and not the tensor: a
term that is 1e-5 of the gradient would drown in it, but it is all of its own error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.part import Part

Column = tuple[Part, Callable[[str], Tensor]]  # a part, and parameter name -> that part of its gradient

EXPLAINED = 1e-3
"""The share of the error that may be left: rounding leaves 1e-5 of the smallest error that is found at all."""


NEAR = 1e-2
"""How far a coefficient may be from a number to be compared with it, of 1 or of the number where that is larger."""

_ALIKE = 1.2
"""How many times the squares may be left by numbers that the fitted coefficients leave: noise is not quite alike."""

_CHANCE = 4.0
"""The same for each coefficient, in units of the mean square that is left: what chance does, in its square."""


@dataclass(frozen=True)
class Fit:
    """The coefficients of parts that explain some tensors best; each part of the golden once is the golden.

    `residual` is what they leave of the error, as a share of it, in the tensor that they explain worst. `measure` is
    the sum of squares that coefficients leave of `count` numbers.
    """

    parts: tuple[Part, ...]
    coefficients: tuple[float, ...]
    residual: float
    measure: Callable[[Sequence[float]], float]
    count: int

    @property
    def explains(self) -> bool:
        """Return whether nothing of the errors is left but rounding."""
        return self.residual < EXPLAINED

    def settle(self, numbers: Sequence[float]) -> Fit:
        """Return the fit with coefficients in whose place one of these numbers leaves as little of the errors.

        Rounding decides how exactly a coefficient is known: to ten digits in float64, in float32 to fewer, the less
        there is of the part in the gradient. What the errors cannot tell from a number is that number.
        """
        settled, free = list(self.coefficients), len(self.coefficients)
        allowed = self.measure(settled) * max(_ALIKE, 1.0 + _CHANCE * free / (self.count - free))
        for place, value in enumerate(self.coefficients):
            near = {number for number in numbers if abs(value - number) <= NEAR * max(1.0, abs(number))}
            tried = [[*settled[:place], number, *settled[place + 1 :]] for number in near]
            # Beside nothing there may be one over the tokens of a batch, which the errors mostly tell from it.
            right = [each for each in tried if self.measure(each) <= allowed]
            if len(right) == 1:
                (settled,) = right
        return replace(self, coefficients=tuple(settled))


def fit_columns(tensors: Sequence[WrongTensor], columns: Sequence[Column]) -> Fit | None:
    """Return the best fit of some tensors' errors together, or None where it would prove nothing.

    Each tensor's error is scaled to norm 1, so that a small error in a large tensor must be explained as well as
    a large one. It proves something where there are at least twice as many numbers as coefficients. Parts that are
    zero in all of these tensors get no coefficient. Shapes: the tensors' elements one after another, (numbers,),
    are fitted on (numbers, columns).
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
    # Columns of norm 1: terms differ by five orders of magnitude (lm 1, z 1e-5), and the solver cuts off small ones.
    matrix = torch.stack([stacked[number] / lengths[number] for number in used], dim=1)
    solution = torch.linalg.lstsq(matrix, target.unsqueeze(1), driver="gelsd").solution
    parts = tuple(columns[number][0] for number in used)
    # The golden has every part once, and nothing of padding.
    right = [1.0 if part.belongs else 0.0 for part in parts]
    sizes = [len(error) for error in errors]
    scales = [lengths[number] for number in used]

    def leave(found: Tensor) -> Tensor:
        return (matrix @ found - target.unsqueeze(1)).squeeze(1)

    def measure(coefficients: Sequence[float]) -> float:
        off = [(value - base) * scale for value, base, scale in zip(coefficients, right, scales, strict=True)]
        left = leave(torch.tensor(off, dtype=matrix.dtype, device=matrix.device).unsqueeze(1))
        return float(left.square().sum())

    off = [float(value) / scale for value, scale in zip(solution, scales, strict=True)]
    found = tuple(base + value for base, value in zip(right, off, strict=True))
    residual = max(float(part.norm()) for part in torch.split(leave(solution), sizes))
    return Fit(parts, found, residual, measure, len(target))
