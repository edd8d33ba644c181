"""MoE blocks on the tp axis, in one of two ways.

`etp`: every rank routes all tokens alike and holds a slice of every expert's hidden units; outputs are summed.
`tokens` (etp 1): ep borrows tp, so each rank routes its slice of the positions, like a data-parallel rank.

Letters: B rows, S positions of this cp rank, H hidden, n ranks of tp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from moeverify.layout.region import Indices, as_indices
from moeverify.model.dispatcher import Dispatcher, ExpertFunction
from moeverify.model.moe import MoE
from moeverify.model.router import RouterStats
from moeverify.parallel.collectives import copy_to, gather_from, reduce_from, split_to, sum_over
from moeverify.parallel.tensor import parallelize_mlp


def apply_expert_slices(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Make every MoE work on all tokens of its tp group with a slice of each expert (etp equal to tp).

    Call it after the experts have been sharded. The gradients that reach x and the combine weights through
    the experts are addends, and are summed over the group; everything else is computed alike on all ranks.
    """
    group = mesh.get_group()
    for moe in _moes(model):
        moe.dispatcher = SlicedDispatcher(moe.dispatcher, group)
        if moe.shared is not None:
            parallelize_mlp(moe.shared, mesh, Replicate())
        if sequence_parallel:
            moe.register_forward_pre_hook(lambda _, args: (gather_from(args[0], 1, group), *args[1:]))
            moe.register_forward_hook(lambda _, args, out: (split_to(out[0], 1, group), out[1]))


def apply_token_slices(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Make every MoE work on this rank's slice of the positions (etp 1, ep borrows tp).

    The router's sums are completed over the group, since the losses are computed alike on its ranks.
    """
    group = mesh.get_group()

    def before(_: nn.Module, args: Any) -> Any:
        x, valid = args
        x = x if sequence_parallel else split_to(x, 1, group)
        return x, valid.chunk(group.size(), dim=1)[group.rank()]

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        y, stats = output
        return y if sequence_parallel else gather_from(y, 1, group), _complete(stats, group)

    stream: Placement = Shard(1)
    for moe in _moes(model):
        if moe.shared is not None:
            parallelize_mlp(moe.shared, mesh, stream)
        moe.register_forward_pre_hook(before)
        moe.register_forward_hook(after)


class SlicedDispatcher:
    """Lets an inner dispatcher run experts of which this rank holds slices, and sums the outputs."""

    def __init__(self, inner: Dispatcher, group: ProcessGroup) -> None:
        self.inner = inner
        self.group = group

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction) -> Tensor:
        """Return the weighted sum (N, H) of the chosen experts' outputs for x (N, H), ids and weights (N, k)."""
        partial = self.inner(copy_to(x, self.group), ids, copy_to(weights, self.group), experts)
        return reduce_from(partial, self.group)


def slice_positions(positions: Indices, group: ProcessGroup) -> Indices:
    """Return which of this rank's positions its routers see under `apply_token_slices`."""
    size = len(positions) // group.size()
    return as_indices(positions[group.rank() * size : (group.rank() + 1) * size])


def partial_parameters(model: nn.Module, *, tokens: bool) -> list[Tensor]:
    """Return the MoE parameters whose gradient on each rank of tp is only an addend."""
    found: list[Tensor] = []
    for moe in _moes(model):
        if tokens:
            found += list(moe.router.parameters())
            found += list(moe.shared_gate.parameters()) if moe.shared_gate is not None else []
        elif moe.experts.down_bias is not None:
            found.append(moe.experts.down_bias)
    return found


def _complete(stats: RouterStats, group: ProcessGroup) -> RouterStats:
    return RouterStats(
        reduce_from(stats.probability_sum, group),
        sum_over(stats.counts, group),
        reduce_from(stats.z_sum, group),
    )


def _moes(model: nn.Module) -> Iterator[MoE]:
    for module in model.modules():
        if isinstance(module, MoE):
            yield module
