"""Contributions of linear layers and norms to their parameters' gradients, recomputed in float64.

The gradients follow from the inputs of a layer and the gradients of its outputs alone:

    dW = dY^T X, (M, K)      db = sum of dY, (M)      of a norm: sum of dY * normalized X, (K)

Only evenly spaced elements are computed, from the few columns of X and dY that they need. Letters: N
tokens, K width of the inputs, M width of the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from moeverify.model.norm import LayerNorm, RMSNorm
from moeverify.model.param_access import identity
from moeverify.model.precision import widen
from moeverify.parallel.regions.region import Region
from moeverify.verification.checks.float8_products import MOST_COLUMNS, MOST_ROWS
from moeverify.verification.checks.wide_parts import split_wide


@dataclass(frozen=True)
class Sample:
    """Evenly spaced elements of a parameter, given by rows and columns. A vector has one row."""

    rows: range
    columns: range

    @classmethod
    def of(cls, *shape: int) -> Sample:
        """Return the sample of a vector or a matrix of this shape."""
        rows = _spread(shape[0], MOST_ROWS) if len(shape) == 2 else range(1)
        return cls(rows, _spread(shape[-1], MOST_COLUMNS))

    def find_in(self, region: Region) -> tuple[list[int], list[int]]:
        """Return the sampled elements within a region: indices in the sample, and local positions."""
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
class LayerContribution:
    """Contributions of some passes on one rank to the sample of a parameter.

    Shapes: (rows, columns), float64. `values` are the expected contributions, and `sizes` the sums of their
    absolute values. `allowed` bounds the rounding errors of the layer. `count` is the number of passes.
    """

    values: Tensor
    sizes: Tensor
    allowed: Tensor
    count: int = 1

    def add(self, other: LayerContribution) -> None:
        """Add the contributions of another pass."""
        self.values = self.values + other.values
        self.sizes = self.sizes + other.sizes
        self.allowed = self.allowed + other.allowed
        self.count += other.count


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of a layer, kept until the gradient of its outputs arrives.

    `columns` (N, columns) are columns of the inputs; for a norm, of the normalized inputs. `sizes` are the
    sums of the absolute terms they were computed from. `num_added` is the number of terms summed for each
    of them.
    """

    columns: Tensor
    sizes: Tensor
    num_added: int


def is_known(module: nn.Module) -> bool:
    """Return whether the formulas of this module apply to a layer's parameters."""
    if isinstance(module, RMSNorm):
        return module.view is identity and module.average is identity
    if isinstance(module, LayerNorm):
        return module.view is identity
    return isinstance(module, nn.Linear)


def keep_inputs(module: nn.Module, x: Tensor) -> LayerInputs:
    """Return the part of a layer's inputs (..., K) that its gradients need."""
    flat = x.detach().reshape(-1, x.shape[-1])
    columns = _as_slice(Sample.of(flat.shape[1]).columns)
    if isinstance(module, nn.Linear):
        kept = flat[:, columns].clone()
        return LayerInputs(kept, kept, 0)
    assert isinstance(module, RMSNorm | LayerNorm)
    # x - mean may cancel, so its rounding is relative to |x| + |mean|.
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
    return LayerInputs(torch.cat(normalized), torch.cat(sizes), flat.shape[1])


def list_contributions(
    module: nn.Module, kept: LayerInputs, of_outputs: Tensor
) -> Iterator[tuple[str, LayerContribution]]:
    """Yield the contribution of a pass to the sample of each parameter, with its attribute name.

    Shape: of_outputs (..., M).
    """
    flat = of_outputs.detach().reshape(-1, of_outputs.shape[-1])
    across = flat[:, _as_slice(Sample.of(flat.shape[1]).columns)].to(torch.float64)
    # Half a unit for each of N additions over tokens, K of a norm, and 16 further roundings, in the wider dtype.
    inner = (len(flat) + kept.num_added + 16.0) * 0.5 * torch.finfo(widen(flat.dtype)).eps
    if getattr(module, "bias", None) is not None:
        yield "bias", _round(across.sum(dim=0), across.abs().sum(dim=0), inner, flat.dtype)
    if isinstance(module, nn.Linear):
        rows = flat[:, _as_slice(_spread(flat.shape[1], MOST_ROWS))].to(torch.float64).T
        if flat.device.type != "cpu":
            # Kernels may accumulate parts of a product in its own dtype.
            inner += torch.finfo(flat.dtype).eps
        columns, sizes = kept.columns.to(torch.float64), kept.sizes.to(torch.float64)
        # (rows, N) @ (N, columns); the sizes bound the cancellation of each sum.
        yield "weight", _round(rows @ columns, rows.abs() @ sizes.abs(), inner, flat.dtype)
    else:
        total, sizes = across * kept.columns, across.abs() * kept.sizes
        yield "weight", _round(total.sum(dim=0), sizes.sum(dim=0), inner, flat.dtype)


def _round(values: Tensor, sizes: Tensor, inner: float, dtype: torch.dtype) -> LayerContribution:
    last = torch.finfo(dtype)
    # The result is rounded once more, to the dtype of the layer. `tiny` covers underflow.
    allowed = inner * sizes + 0.5 * last.eps * values.abs() + last.tiny
    rows = values.reshape(-1, values.shape[-1])
    return LayerContribution(rows, rows.abs(), allowed.reshape(rows.shape))


def _spread(length: int, most: int) -> range:
    """Return at most `most` evenly spaced numbers below `length`."""
    return range(0, length, max(1, -(-length // most)))


def _as_slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop, numbers.step)
