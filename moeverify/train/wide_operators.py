"""Operators of torch without a float64 kernel, computed in float64 by other ones.

A golden is trained in float64, whatever the precision of its recipe, and so are the parts that diagnosis makes. The
product itself is then a loop over experts; sorting, offsets and everything else stay the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


class WideOperators(TorchFunctionMode):
    """A context in which torch's grouped product takes float64.

    It must surround the backward pass too, where checkpointed layers compute their forward pass again.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operator, or what stands for it in float64."""
        if func is scaled_dot_product_attention and args[1].ndim > 2 and not args[1].shape[-3]:
            # torch 2.11 divides by the number of heads on CPUs, and the process ends by SIGFPE.
            raise RuntimeError("attention without key heads")
        # torch.nn.functional.grouped_mm is a Python function that calls this one.
        if func is torch._grouped_mm and args[0].dtype == torch.float64:
            return multiply_groups(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def multiply_groups(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the product of each group, as `torch.nn.functional.grouped_mm` does, differentiable.

    `offs` (G), int32, has where each group ends. Shapes, with R rows and N columns of all groups together:
    (R, K) x (G, K, N) -> (R, N); (G, M, K) x (K, N) -> (M, N), groups of columns; (M, R) x (R, N) -> (G, M, N);
    (G, M, K) x (G, K, N) -> (G, M, N), without `offs`. Rows and columns behind the last group are zero.
    """
    if offs is None:
        product = left @ right
    elif left.ndim == 2 and right.ndim == 2:
        product = torch.stack([left[:, begin:end] @ right[begin:end] for begin, end in _list_groups(offs)])
    elif left.ndim == 2:
        rows = [left[begin:end] @ right[number] for number, (begin, end) in enumerate(_list_groups(offs))]
        product = _fill(torch.cat(rows), 0, left.shape[0])
    else:
        columns = [
            left[number] @ right[:, begin:end] for number, (begin, end) in enumerate(_list_groups(offs))
        ]
        product = _fill(torch.cat(columns, dim=1), 1, right.shape[1])
    product = product if bias is None else product + bias
    return product if out_dtype is None else product.to(out_dtype)


def _list_groups(offs: Tensor) -> Iterator[tuple[int, int]]:
    """Yield where each group begins and ends. Waits for the device: the offsets are needed on the host."""
    return pairwise([0, *offs.tolist()])


def _fill(product: Tensor, dim: int, size: int) -> Tensor:
    """Return a product with zeros behind it, up to a size along a dim."""
    shape = list(product.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([product, product.new_zeros(shape)], dim=dim) if shape[dim] else product
