"""Replacements in torch for OLMo-core's permutations of tokens, which are Triton kernels for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def gather(x: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int) -> Tensor:
    """Return the tokens x (T, D) in the order of their experts, (T * top_k, D)."""
    return x[indices.long() // top_k]


def scatter(
    x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int
) -> Tensor:
    """Return the weighted sum of the experts' outputs x (T * top_k, D) for each token, (T, D)."""
    if weights is not None:
        x = x * weights.flatten()[indices.long()].unsqueeze(-1).to(x.dtype)
    return x.new_zeros(len(x) // top_k, x.shape[1]).index_add(0, indices.long() // top_k, x)


def replace_kernels() -> None:
    """Let OLMo-core call `gather` and `scatter` for tensors that are not on a GPU."""
    from olmo_core.ops import moe

    for replacement in (gather, scatter):
        kernel = getattr(moe, replacement.__name__)
        if not hasattr(kernel, "replacement"):
            setattr(moe, replacement.__name__, _choose(kernel, replacement))


def _choose(kernel: Callable[..., Tensor], replacement: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(x: Tensor, *arguments: Any) -> Tensor:
        return (kernel if x.is_cuda else replacement)(x, *arguments)

    call.replacement = replacement  # type: ignore[attr-defined]  # marks that it is replaced already
    return call
