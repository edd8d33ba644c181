"""Reductions that complete gradients after the last backward pass, where no wrapper performs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from moeverify.parallel.collectives import check_contiguous
from moeverify.parallel.regions.placement import local_part
from moeverify.seams import seam


@dataclass(frozen=True)
class Reduction:
    """A pending reduction of partial gradients: sum over `group`, if any, then divide by `divisor`."""

    parameters: Sequence[Tensor]
    group: ProcessGroup | None
    divisor: float = 1.0


@torch.no_grad()
def add_shared(first: Tensor, second: Tensor) -> None:
    """Replace the gradients of two copies of one logical parameter on this rank by their sum."""
    one, other = first.grad, second.grad
    assert one is not None
    assert other is not None
    # Both copies get the sum and stay equal, although the optimizer steps each separately.
    total = local_part(one) + local_part(other)
    local_part(one).copy_(total)
    local_part(other).copy_(total)


@seam
@torch.no_grad()
def finalize_gradients(parameters: Sequence[Tensor], reductions: Sequence[Reduction]) -> None:
    """Complete the gradients in place. Collective: all ranks of each group, in the same order.

    The gradient of a DTensor may have other placements than its parameter: for a vocabulary-sharded
    embedding it is replicated. It is redistributed to the parameter's placements, because the optimizer
    needs them equal.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)
    # All ranks of a group have the same reductions, and the same parameters in each, in the same order.
    for reduction in reductions:
        for parameter in reduction.parameters:
            if parameter.grad is not None:
                _reduce(local_part(parameter.grad), reduction)


def _reduce(local: Tensor, reduction: Reduction) -> None:
    # gloo reduces the storage of a strided view instead of the view (pytorch #192920), so a contiguous copy
    # is reduced.
    whole = local.contiguous()
    if reduction.group is not None:
        dist.all_reduce(check_contiguous(whole), group=reduction.group)
    if reduction.divisor != 1.0:
        whole /= reduction.divisor
    if whole is not local:
        local.copy_(whole)
