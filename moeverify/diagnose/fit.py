"""Least squares of wrong gradients on the golden's parts: which linear combination of them was computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.diagnose.components import TERMS, Components

Column = Callable[[str], Tensor]  # parameter name -> that part of its gradient


@dataclass(frozen=True)
class Fit:
    """The coefficients that explain some gradients best. `residual` is relative to the norm of the gradients."""

    labels: tuple[str, ...]
    coefficients: tuple[float, ...]
    residual: float


def fit_columns(actual: Sequence[tuple[str, Tensor]], columns: Sequence[tuple[str, Column]]) -> Fit | None:
    """Return the best fit of some parameters' gradients together, or None where it would prove nothing.

    It proves something where there are at least twice as many numbers as coefficients. Parts that are zero
    for all of these parameters get no coefficient.
    """
    target = torch.cat([gradient.reshape(-1) for _, gradient in actual])
    stacked = [torch.cat([column(name).reshape(-1) for name, _ in actual]) for _, column in columns]
    norm = float(target.norm())
    used = [number for number, part in enumerate(stacked) if float(part.norm()) > 1e-14 * max(norm, 1e-300)]
    if not used or len(target) < 2 * len(used) or norm == 0.0:
        return None
    matrix = torch.stack([stacked[number] for number in used], dim=1)
    scale = matrix.norm(dim=0)
    solution = torch.linalg.lstsq(matrix / scale, target.unsqueeze(1), driver="gelsd").solution
    residual = float((matrix / scale @ solution - target.unsqueeze(1)).norm()) / norm
    coefficients = (solution.squeeze(1) / scale).tolist()
    return Fit(tuple(columns[number][0] for number in used), tuple(coefficients), residual)


def scale_columns(components: Components) -> list[tuple[str, Column]]:
    """Return the golden itself as the one part."""

    def total(name: str) -> Tensor:
        return torch.stack([components.term(term, name) for term in TERMS]).sum(dim=0)

    return [("golden", total)]


def term_columns(components: Components) -> list[tuple[str, Column]]:
    """Return the loss terms as parts."""
    return [(term, lambda name, term=term: components.term(term, name)) for term in TERMS]  # type: ignore[misc]


def padding_columns(components: Components) -> list[tuple[str, Column]]:
    """Return the loss terms, and what padding would add to each."""
    extra = [
        (f"{term} of padding", lambda name, term=term: components.padding[term][name])  # type: ignore[misc]
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
