"""The seven functions of `megablocks_ops`, megablocks' CUDA extension, in plain torch on any device.

They are used where the extension is not compiled. All accept the arguments from `megablocks/ops/*.py`
0.10.0, write to the same outputs as the extension, and do not synchronize with the device.

Source: megablocks 0.10.0, csrc/{cumsum,histogram,indices,replicate,sort}.h.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def exclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    """Write the exclusive cumulative sum of x along `dim` to `out`. Shapes: x and out (rows, n), integers."""
    torch.cumsum(x, dim, dtype=x.dtype, out=out)
    out -= x


def inclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    """Write the inclusive cumulative sum of x along `dim` to `out`. Shapes: x and out (rows, n), integers."""
    torch.cumsum(x, dim, dtype=x.dtype, out=out)


def histogram(x: Tensor, num_bins: int) -> Tensor:
    """Return the counts of the values 0 .. num_bins - 1 in each row of x; other values are not counted.

    Shapes: x (n) or (rows, n), integers.
    Returns: (num_bins) or (rows, num_bins) int32.
    """
    # Compute the number of rows: reshape cannot infer -1 if a rank has no tokens.
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).long()
    # An extra bin collects uncounted values. Integer additions are exact in any order.
    bins = torch.where((rows >= 0) & (rows < num_bins), rows, num_bins)
    counts = torch.zeros(len(rows), num_bins + 1, dtype=torch.int32, device=x.device)
    counts.scatter_add_(1, bins, torch.ones_like(bins, dtype=torch.int32))
    return counts[:, :num_bins].reshape(*x.shape[:-1], num_bins).contiguous()


def indices(
    padded_bins: Tensor, block_size: int, output_block_rows: int, output_block_columns: int, out: Tensor
) -> None:
    """Write the column of every block of a block-diagonal matrix to `out`, in row-major order of blocks.

    Rows of bin b end before row `padded_bins[b]` and have the blocks b * columns .. (b + 1) * columns - 1.

    Shapes: padded_bins (bins) int32; out (rows * columns) int16. Units: `output_block_rows` and
    `output_block_columns` (per bin) in blocks, `padded_bins` in elements.
    """
    starts = torch.arange(output_block_rows, device=out.device) * block_size
    owner = torch.searchsorted(padded_bins.long(), starts, right=True)
    columns = torch.arange(output_block_columns, device=out.device)
    blocks = owner[:, None] * output_block_columns + columns
    out.copy_(blocks.flatten())


def replicate_forward(x: Tensor, bins: Tensor, out: Tensor) -> None:
    """Write the x of its bin to each column of `out`; columns after the last bin are undefined.

    Shapes: x (rows, bins), bins (bins) int32 ends, out (rows, columns).
    """
    columns = torch.arange(out.shape[1], device=out.device)
    owner = torch.searchsorted(bins.long(), columns, right=True).clamp_(max=len(bins) - 1)
    out.copy_(x.index_select(1, owner))


def replicate_backward(grad: Tensor, bins: Tensor, out: Tensor) -> None:
    """Write the sum of `grad` over the columns of each bin to `out`.

    Shapes: grad (rows, columns), bins (bins) int32 ends, out (rows, bins).
    """
    columns = torch.arange(grad.shape[1], device=grad.device)
    owner = torch.searchsorted(bins.long(), columns, right=True)
    wide = torch.promote_types(grad.dtype, torch.float32)
    # A product with the one-hot bins sums in a fixed order; atomics would not.
    one_hot = (owner[:, None] == torch.arange(len(bins), device=grad.device)).to(wide)
    out.copy_(grad.to(wide) @ one_hot)


def sort(x: Tensor, end_bit: int, x_out: Tensor, iota_out: Tensor) -> None:
    """Write x, sorted by its lowest `end_bit` bits, to `x_out`, and the sorted indices to `iota_out`.

    The sort is stable. Shapes: all (n), of one integer dtype.
    """
    keys = x.long() & ((1 << min(end_bit, 63)) - 1)
    order = keys.sort(stable=True).indices
    x_out.copy_(x.index_select(0, order))
    iota_out.copy_(order)
