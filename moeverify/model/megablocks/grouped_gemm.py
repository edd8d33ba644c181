"""A replacement for `grouped_gemm` by torch's grouped product, or by a loop where that does not apply.

It is used where the package is not compiled. megablocks calls `ops.gmm` with gradients and `backend.gmm`
without.

Source: interfaces in grouped_gemm 0.3.0, ops.py and backend.py, and their uses in megablocks 0.10.0.
Letters: M rows, sorted by expert; E experts; K, N columns.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional

_ROW_BYTES = 16


def multiply(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    """Return a_e @ b_e for the rows of every expert e, with gradients.

    Shapes: a (M, K), b (E, K, N) or with `trans_b` (E, N, K), batch_sizes (E) int64 on the CPU.
    Returns: (M, N).
    """
    right = b.transpose(-2, -1) if trans_b else b
    if not _fits(a, b):
        # unbind instead of indexing: its backward stacks, while E indexing operations would add E full-size
        # tensors.
        parts = zip(torch.split(a, batch_sizes.tolist()), right.unbind(), strict=True)
        return torch.cat([rows @ matrix for rows, matrix in parts])
    return functional.grouped_mm(a, right, offs=_offsets(batch_sizes, a.device))


def multiply_raw(
    a: Tensor,
    b: Tensor,
    batch_sizes: Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    c: Tensor | None = None,
) -> Tensor:
    """Return the product of every expert without gradients, written into `c` if given.

    Shapes: as in `multiply`; with `trans_a`, a (M, K) and b (M, N) give a_e^T @ b_e (E, K, N).
    """
    with torch.no_grad():
        product = _multiply_transposed(a, b, batch_sizes) if trans_a else multiply(a, b, batch_sizes, trans_b)
        return product if c is None else c.copy_(product)


def _multiply_transposed(a: Tensor, b: Tensor, batch_sizes: Tensor) -> Tensor:
    if not _fits(a, b):
        sizes = batch_sizes.tolist()
        return torch.stack(
            [x.t() @ y for x, y in zip(torch.split(a, sizes), torch.split(b, sizes), strict=True)]
        )
    return functional.grouped_mm(a.t(), b, offs=_offsets(batch_sizes, a.device))


def _fits(a: Tensor, b: Tensor) -> bool:
    """Return whether torch's grouped product supports the dtype and the row sizes."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    widths = (a.shape[-1], *b.shape[-2:]) if b.ndim > 2 else (a.shape[-1], b.shape[-1])
    return a.dtype in dtypes and not any(width * a.element_size() % _ROW_BYTES for width in widths)


def _offsets(batch_sizes: Tensor, device: torch.device) -> Tensor:
    return batch_sizes.cumsum(0).to(device=device, dtype=torch.int32, non_blocking=True)


ops = SimpleNamespace(gmm=multiply)
backend = SimpleNamespace(gmm=multiply_raw)
