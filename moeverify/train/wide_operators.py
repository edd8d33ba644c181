"""Float64 replacements for torch operators that have no float64 kernel.

Goldens are trained in float64 for every precision of a recipe, and so are the gradient parts of the
diagnosis. Only the product is replaced, by a loop over experts. Sorting, offsets and everything else stay
the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moeverify.train.pass_mode import PassMode


class WideOperators(PassMode):
    """A context of forward and backward passes in which torch's grouped product accepts float64."""

    def substitute(self, func: Any, args: Sequence[Any]) -> Callable[..., Any]:
        """Return the operator or its float64 replacement."""
        if func is scaled_dot_product_attention and args[1].ndim > 2 and not args[1].shape[-3]:
            # torch 2.11 divides by the number of heads on CPUs: with no heads the process dies of SIGFPE.
            raise RuntimeError("attention without key heads")
        # torch.nn.functional.grouped_mm is a Python function that calls torch._grouped_mm.
        if func is torch._grouped_mm and args[0].dtype == torch.float64:
            return multiply_groups
        return super().substitute(func, args)


def multiply_groups(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the product of each group, as `torch.nn.functional.grouped_mm` does; differentiable.

    `offs` (G) int32 is the end of each group. Shapes, with R rows and N columns of all groups together:
    (R, K) x (G, K, N) -> (R, N); (G, M, K) x (K, N) -> (M, N) with groups of columns;
    (M, R) x (R, N) -> (G, M, N); (G, M, K) x (G, K, N) -> (G, M, N) without `offs`.
    Rows and columns after the last group are zero.
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
    """Yield the begin and end of each group. Synchronizes with the device to read the offsets."""
    return pairwise([0, *offs.tolist()])


def _fill(product: Tensor, dim: int, size: int) -> Tensor:
    """Pad a product with zeros along a dim to `size`."""
    shape = list(product.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([product, product.new_zeros(shape)], dim=dim) if shape[dim] else product
