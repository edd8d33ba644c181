"""Least squares of wrong gradients on the golden's parts: which linear combination of them was computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.diagnose.components import TERMS, Components

PADDING = "of padding"

Column = Callable[[str], Tensor]  # parameter name -> that part of its gradient


@dataclass(frozen=True)
class Wrong:
    """A wrong gradient and its golden, float64."""

    name: str
    actual: Tensor
    expected: Tensor


@dataclass(frozen=True)
class Fit:
    """The coefficients of the golden's parts that explain some gradients best; all ones is the golden.

    `residual` is what they leave of the error, as a share of it, in the gradient that they explain worst.
    """

    labels: tuple[str, ...]
    coefficients: tuple[float, ...]
    residual: float


def fit_columns(wrong: Sequence[Wrong], columns: Sequence[tuple[str, Column]]) -> Fit | None:
    """Return the best fit of some gradients' errors together, or None where it would prove nothing.

    Each gradient's error is scaled to norm 1, so that a small error in a large gradient must be explained as
    well as a large one. It proves something where there are at least twice as many numbers as coefficients.
    Parts that are zero for all of these parameters get no coefficient.
    """
    errors = [(item.actual - item.expected).reshape(-1) for item in wrong]
    norms = [float(error.norm()) or 1.0 for error in errors]
    target = torch.cat([error / norm for error, norm in zip(errors, norms, strict=True)])
    stacked = [
        torch.cat([column(item.name).reshape(-1) / norm for item, norm in zip(wrong, norms, strict=True)])
        for _, column in columns
    ]
    lengths = [float(part.norm()) for part in stacked]
    used = [number for number, length in enumerate(lengths) if length > 1e-12 * max(lengths)]
    if not used or len(target) < 2 * len(used):
        return None
    matrix = torch.stack([stacked[number] / lengths[number] for number in used], dim=1)
    solution = torch.linalg.lstsq(matrix, target.unsqueeze(1), driver="gelsd").solution
    left = (matrix @ solution - target.unsqueeze(1)).squeeze(1)
    residual = max(float(part.norm()) for part in left.split([len(error) for error in errors]))
    labels = tuple(columns[number][0] for number in used)
    off = [float(value) / lengths[number] for value, number in zip(solution, used, strict=True)]
    # The golden has every part once, and nothing of padding.
    whole = [0.0 if label.endswith(PADDING) else 1.0 for label in labels]
    return Fit(labels, tuple(base + value for base, value in zip(whole, off, strict=True)), residual)


def scale_columns(wrong: Sequence[Wrong]) -> list[tuple[str, Column]]:
    """Return the golden itself as the one part."""
    whole = {item.name: item.expected for item in wrong}
    return [("golden", lambda name: whole[name])]


def term_columns(components: Components) -> list[tuple[str, Column]]:
    """Return the loss terms as parts."""
    return [(term, lambda name, term=term: components.term(term, name)) for term in TERMS]  # type: ignore[misc]


def padding_columns(components: Components) -> list[tuple[str, Column]]:
    """Return the loss terms, and what padding would add to each."""
    extra = [
        (f"{term} {PADDING}", lambda name, term=term: components.padding[term][name])
        for term in TERMS
        if term in components.padding
    ]
    return term_columns(components) + extra


def share_columns(components: Components) -> list[tuple[str, Column]]:
    """Return the cells as parts, all terms of a cell weighted alike."""
    return [
        (cell.label, lambda name, number=number: components.cell(number, name))  # type: ignore[misc]
        for number, cell in enumerate(components.cells)
    ]


def term_share_columns(components: Components) -> list[tuple[str, Column]]:
    """Return the parts by term and cell."""
    return [
        (f"{term} of {cell.label}", lambda name, t=term, n=number: components.parts[t][n][name])  # type: ignore[misc]
        for term in TERMS
        for number, cell in enumerate(components.cells)
    ]
