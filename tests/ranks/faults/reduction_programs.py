"""Wrong collectives for `--fault reduction_programs:NAME`, each identifiable from its operands."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moeverify.faults.patch import Original, Patch
from moeverify.model.dispatcher import ExpertFunction
from moeverify.parallel import gradients
from moeverify.parallel.expert import AllToAllDispatcher
from moeverify.parallel.gradients import Reduction
from moeverify.train import assemble


def take_largest(patch: Patch) -> None:
    """Complete gradients with the maximum over the ranks."""

    @patch.wrap(gradients._reduce)
    def largest(original: Original[None], local: Tensor, reduction: Reduction) -> None:
        whole = local.contiguous()
        dist.all_reduce(whole, group=reduction.group, op=dist.ReduceOp.MAX)
        local.copy_(whole / reduction.divisor)


def copy_first(patch: Patch) -> None:
    """Complete gradients with those of the first rank."""

    @patch.wrap(gradients._reduce)
    def first(original: Original[None], local: Tensor, reduction: Reduction) -> None:
        whole = local.contiguous()
        dist.broadcast(whole, group=reduction.group, group_src=0)
        local.copy_(whole / reduction.divisor)


def count_again(patch: Patch) -> None:
    """Sum the counts of the routers over the ranks twice."""

    @patch.wrap(assemble._sum_over_groups)
    def twice(original: Original[Tensor], tensor: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
        total = original(tensor, groups)
        return original(total, groups) if tensor.ndim == 1 else total


def cut_tokens(patch: Patch) -> None:
    """Send tokens to the experts detached from their graph."""

    @patch.wrap(AllToAllDispatcher.__call__)
    def cut(
        original: Original[Tensor],
        self: AllToAllDispatcher,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: ExpertFunction,
    ) -> Tensor:
        return original(self, x.detach(), ids, weights, experts)
