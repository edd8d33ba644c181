"""Least squares of wrong tensors on parts of their goldens: which linear combination of them was computed.

With parts c_i (each a tensor of the golden's shape, all of them together the golden) a wrong sum is
`actual = sum_i k_i * c_i`, so the error is `sum_i (k_i - 1) * c_i`. The error is fitted and not the tensor: a
term that is 1e-5 of the gradient would drown in it, but it is all of its own error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.part import WHOLE, Part

Column = tuple[Part, Callable[[str], Tensor]]  # a part, and parameter name -> that part of its gradient

EXPLAINED = 1e-3
"""The share of the error that may be left: rounding leaves 1e-5 of the smallest error that is found at all."""


@dataclass(frozen=True)
class Fit:
    """The coefficients of parts that explain some tensors best; each part of the golden once is the golden.

    `residual` is what they leave of the error, as a share of it, in the tensor that they explain worst.
    """

    parts: tuple[Part, ...]
    coefficients: tuple[float, ...]
    residual: float

    @property
    def explains(self) -> bool:
        """Return whether nothing of the errors is left but rounding."""
        return self.residual < EXPLAINED


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
    left = (matrix @ solution - target.unsqueeze(1)).squeeze(1)
    residual = max(float(part.norm()) for part in left.split([len(error) for error in errors]))
    parts = tuple(columns[number][0] for number in used)
    off = [float(value) / lengths[number] for value, number in zip(solution, used, strict=True)]
    # The golden has every part once, and nothing of padding.
    right = [1.0 if part.belongs else 0.0 for part in parts]
    return Fit(parts, tuple(base + value for base, value in zip(right, off, strict=True)), residual)


def fit_multiple(tensor: WrongTensor) -> Fit | None:
    """Return the best fit of one tensor by a multiple of its golden, or None where it would prove nothing."""
    return fit_columns([tensor], [(WHOLE, lambda name: tensor.expected)])
