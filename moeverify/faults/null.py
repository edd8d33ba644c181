"""Null faults: changes that alter results only by rounding, as a test for false alarms."""

from __future__ import annotations

from moeverify.faults.patch import Patch


def reverse_reductions(patch: Patch) -> None:
    """Sum in moeverify's collectives from the last rank to the first, which changes every rounding."""
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from moeverify.parallel import collectives

    @patch.replace(collectives.sum_over, used_by=collectives)
    def sum_backwards(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        parts = [torch.empty_like(tensor.contiguous()) for _ in range(group.size())]
        dist.all_gather(parts, tensor.detach().contiguous(), group=group)
        total = parts[-1]
        for part in reversed(parts[:-1]):
            total = total + part
        return total
