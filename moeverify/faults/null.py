"""Null faults: changes that must not change any answer beyond rounding, to see that nothing cries wolf."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from moeverify.parallel import collectives


def reverse_reductions() -> None:
    """Sum in our own collectives from the last rank to the first, so that every rounding is another one."""

    def sum_over(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        parts = [torch.empty_like(tensor.contiguous()) for _ in range(group.size())]
        dist.all_gather(parts, tensor.detach().contiguous(), group=group)
        total = parts[-1]
        for part in reversed(parts[:-1]):
            total = total + part
        return total

    collectives.sum_over = sum_over
