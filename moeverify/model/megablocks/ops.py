"""The seven functions of `megablocks_ops`, megablocks' CUDA extension, in plain torch, on any device.

They stand in where the extension is not compiled. All take what `megablocks/ops/*.py` 0.10.0 gives them, write
where the extension writes, and do not wait for the device.

Source: megablocks 0.10.0, csrc/{cumsum,histogram,indices,replicate,sort}.h.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def exclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    """Write the sum of all elements before each along `dim` into `out`. Shapes: x and out (rows, n), integers."""
    torch.cumsum(x, dim, dtype=x.dtype, out=out)
    out -= x


def inclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    """Write the sum up to and with each element along `dim` into `out`. Shapes: x and out (rows, n), integers."""
    torch.cumsum(x, dim, dtype=x.dtype, out=out)


def histogram(x: Tensor, num_bins: int) -> Tensor:
    """Return how often each of 0 .. num_bins - 1 stands in each row of x; other values are not counted.

    Shapes: x (n) or (rows, n), integers; returns (num_bins) or (rows, num_bins) int32.
    """
    # Not -1: a rank may get no tokens at all, and then it says nothing.
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).long()
    # One bin more for what is not counted. Integer additions: any order gives the same.
    bins = torch.where((rows >= 0) & (rows < num_bins), rows, num_bins)
    counts = torch.zeros(len(rows), num_bins + 1, dtype=torch.int32, device=x.device)
    counts.scatter_add_(1, bins, torch.ones_like(bins, dtype=torch.int32))
    return counts[:, :num_bins].reshape(*x.shape[:-1], num_bins).contiguous()


def indices(
    padded_bins: Tensor, block_size: int, output_block_rows: int, output_block_columns: int, out: Tensor
) -> None:
    """Write the column of every block of a block-diagonal matrix, row of blocks by row of blocks, into `out`.

    The rows of bin b, which ends before row `padded_bins[b]`, have the blocks b * columns .. (b + 1) * columns - 1.

    Shapes: padded_bins (bins) int32; out (rows * columns) int16. Units: `output_block_rows` and
    `output_block_columns` (those of one bin) in blocks, `padded_bins` in elements.
    """
    starts = torch.arange(output_block_rows, device=out.device) * block_size
    owner = torch.searchsorted(padded_bins.long(), starts, right=True)
    columns = torch.arange(output_block_columns, device=out.device)
    blocks = owner[:, None] * output_block_columns + columns
    out.copy_(blocks.flatten())


def replicate_forward(x: Tensor, bins: Tensor, out: Tensor) -> None:
    """Write into each column j of `out` the x of the bin that j lies in; columns behind all bins stay undefined.

    Shapes: x (rows, bins), bins (bins) int32 ends, out (rows, columns).
    """
    columns = torch.arange(out.shape[1], device=out.device)
    owner = torch.searchsorted(bins.long(), columns, right=True).clamp_(max=len(bins) - 1)
    out.copy_(x.index_select(1, owner))


def replicate_backward(grad: Tensor, bins: Tensor, out: Tensor) -> None:
    """Write the sum of `grad` over the columns of each bin into `out`.

    Shapes: grad (rows, columns), bins (bins) int32 ends, out (rows, bins).
    """
    columns = torch.arange(grad.shape[1], device=grad.device)
    owner = torch.searchsorted(bins.long(), columns, right=True)
    wide = torch.promote_types(grad.dtype, torch.float32)
    # A product with the one-hot owner, whose sums have a fixed order where atomics would have none.
    one_hot = (owner[:, None] == torch.arange(len(bins), device=grad.device)).to(wide)
    out.copy_(grad.to(wide) @ one_hot)


def sort(x: Tensor, end_bit: int, x_out: Tensor, iota_out: Tensor) -> None:
    """Write x, sorted by its lowest `end_bit` bits, into `x_out`, and where each element stood into `iota_out`.

    Equal keys keep their order. Shapes: all (n), of one integer dtype.
    """
    keys = x.long() & ((1 << min(end_bit, 63)) - 1)
    order = keys.sort(stable=True).indices
    x_out.copy_(x.index_select(0, order))
    iota_out.copy_(order)
