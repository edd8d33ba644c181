"""What linear layers and norms add to the gradients of their parameters, computed again in float64.

A layer's parameters get their gradients from its inputs and from the gradients of its outputs alone:

    dW = dY^T X, (M, K)      db = sum of dY, (M)      of a norm: sum of dY * normalized X, (K)

Some elements in equal distances are computed, from the few columns of X and dY that they are made of. Letters: N
tokens, K width of the inputs, M width of the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from moeverify.checks.float8_products import MOST_COLUMNS, MOST_ROWS
from moeverify.checks.wide_parts import split_wide
from moeverify.layout.region import Region
from moeverify.model.norm import LayerNorm, RMSNorm
from moeverify.model.param_access import identity
from moeverify.model.precision import widen


@dataclass(frozen=True)
class Sample:
    """Elements of a parameter in equal distances: those of some rows and columns; a vector has one row."""

    rows: range
    columns: range

    @classmethod
    def of(cls, *shape: int) -> Sample:
        """Return the sample of a vector or a matrix of this shape."""
        rows = _spread(shape[0], MOST_ROWS) if len(shape) == 2 else range(1)
        return cls(rows, _spread(shape[-1], MOST_COLUMNS))

    def find_in(self, region: Region) -> tuple[list[int], list[int]]:
        """Return which elements a rank has that holds a region: their places in the sample and in its local part."""
        dims = region.dims if len(region.dims) == 2 else (range(1), *region.dims)
        width = region.shape[-1]
        inside, local = [], []
        for number, (row, column) in enumerate(product(self.rows, self.columns)):
            if region.flat is not None:
                position = row * width + column
                if position in region.flat:
                    inside.append(number)
                    local.append(position - region.flat.start)
            elif row in dims[0] and column in dims[1]:
                inside.append(number)
                local.append(dims[0].index(row) * len(dims[1]) + dims[1].index(column))
        return inside, local


@dataclass
class Added:
    """What passes of one rank have added to the sample of a parameter. Shapes: (rows, columns), float64.

    `values` is what they should have, `sizes` the sum of their absolute values, and `allowed` what is lost where a
    layer computes and rounds them; of `count` passes.
    """

    values: Tensor
    sizes: Tensor
    allowed: Tensor
    count: int = 1

    def add(self, other: Added) -> None:
        """Add what one more pass adds."""
        self.values = self.values + other.values
        self.sizes = self.sizes + other.sizes
        self.allowed = self.allowed + other.allowed
        self.count += other.count


@dataclass(frozen=True)
class Kept:
    """What is kept of a layer's inputs until the gradient of its outputs comes.

    `columns` (N, columns) are those of the inputs, or of the normalized ones; `sizes` are as large as what they were
    computed from. `num_added` is how many numbers were added up for each of them.
    """

    columns: Tensor
    sizes: Tensor
    num_added: int


def is_known(module: nn.Module) -> bool:
    """Return whether a module's parameters get their gradients by the formulas above."""
    if isinstance(module, RMSNorm):
        return module.view is identity and module.average is identity
    if isinstance(module, LayerNorm):
        return module.view is identity
    return isinstance(module, nn.Linear)


def keep_inputs(module: nn.Module, x: Tensor) -> Kept:
    """Return what is kept of a layer's inputs (..., K)."""
    flat = x.detach().reshape(-1, x.shape[-1])
    columns = _as_slice(Sample.of(flat.shape[1]).columns)
    if isinstance(module, nn.Linear):
        kept = flat[:, columns].clone()
        return Kept(kept, kept, 0)
    assert isinstance(module, RMSNorm | LayerNorm)
    normalized, sizes = [], []
    for _, wide in split_wide(flat):
        mean = (
            wide.mean(dim=-1, keepdim=True)
            if isinstance(module, LayerNorm)
            else torch.zeros_like(wide[:, :1])
        )
        scale = ((wide - mean).square().mean(dim=-1, keepdim=True) + module.eps).rsqrt()
        normalized.append(((wide - mean) * scale)[:, columns])
        sizes.append(((wide.abs() + mean.abs()) * scale)[:, columns])
    return Kept(torch.cat(normalized), torch.cat(sizes), flat.shape[1])


def list_added(module: nn.Module, kept: Kept, of_outputs: Tensor) -> Iterator[tuple[str, Added]]:
    """Yield what a pass adds to the sample of each parameter, by attribute. Shape: of_outputs (..., M)."""
    flat = of_outputs.detach().reshape(-1, of_outputs.shape[-1])
    across = flat[:, _as_slice(Sample.of(flat.shape[1]).columns)].to(torch.float64)
    inner = (len(flat) + kept.num_added + 16.0) * 0.5 * torch.finfo(widen(flat.dtype)).eps
    if getattr(module, "bias", None) is not None:
        yield "bias", _round(across.sum(dim=0), across.abs().sum(dim=0), inner, flat.dtype)
    if isinstance(module, nn.Linear):
        rows = flat[:, _as_slice(_spread(flat.shape[1], MOST_ROWS))].to(torch.float64).T
        if flat.device.type != "cpu":
            # Kernels may add up parts of a product in its own dtype.
            inner += torch.finfo(flat.dtype).eps
        columns, sizes = kept.columns.to(torch.float64), kept.sizes.to(torch.float64)
        yield "weight", _round(rows @ columns, rows.abs() @ sizes.abs(), inner, flat.dtype)
    else:
        total, sizes = across * kept.columns, across.abs() * kept.sizes
        yield "weight", _round(total.sum(dim=0), sizes.sum(dim=0), inner, flat.dtype)


def _round(values: Tensor, sizes: Tensor, inner: float, dtype: torch.dtype) -> Added:
    last = torch.finfo(dtype)
    allowed = inner * sizes + 0.5 * last.eps * values.abs() + last.tiny
    rows = values.reshape(-1, values.shape[-1])
    return Added(rows, rows.abs(), allowed.reshape(rows.shape))


def _spread(length: int, most: int) -> range:
    """Return at most `most` numbers below `length` in equal distances."""
    return range(0, length, max(1, -(-length // most)))


def _as_slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop, numbers.step)
