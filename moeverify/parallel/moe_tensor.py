"""MoE blocks on the tp and etp axes.

If `etp` equals tp, every rank routes all tokens and holds a slice of every expert's hidden units; outputs
are summed. Otherwise the experts borrow the tp axis: each rank routes its slice of the positions, like a
data-parallel rank. With etp above 1, the ranks that share an expert gather their tokens, and each gets back
the summed outputs of its own tokens.

Notation: B rows, S positions of this cp rank, H hidden, n ranks of tp.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from moeverify.model.dispatcher import Dispatcher, ExpertFunction
from moeverify.model.moe import list_moe_layers
from moeverify.model.router import RouterStats
from moeverify.parallel.collectives import (
    all_gather_sum,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_from,
    split_to,
    sum_over,
)
from moeverify.parallel.regions.region import Indices, as_indices
from moeverify.parallel.tensor import parallelize_mlp
from moeverify.seams import seam


def apply_expert_slices(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Make every MoE process all tokens of its tp group with a slice of each expert (etp equal to tp).

    Call it after the experts have been sharded. The gradients that reach x and the combine weights through
    the experts are unreduced partial sums, and are summed over the group. All other gradients are identical
    on all ranks.
    """
    group = mesh.get_group()
    for moe in list_moe_layers(model):
        moe.dispatcher = SlicedDispatcher(moe.dispatcher, group)
        if moe.shared is not None:
            parallelize_mlp(moe.shared, mesh, Replicate())
        if sequence_parallel:
            # (B, S/n, H) -> (B, S, H) and back. Between this gather and `SlicedDispatcher` all ranks
            # compute the same, so each keeps its slice of the gradient.
            moe.register_forward_pre_hook(lambda _, args: (gather_from(args[0], 1, group), *args[1:]))
            moe.register_forward_hook(lambda _, args, out: (split_to(out[0], 1, group), out[1]))


@seam
def apply_token_slices(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Make every MoE process this rank's slice of the positions (etp not equal to tp).

    The router statistics are summed over the group, because all its ranks compute the same router losses.
    """
    group = mesh.get_group()

    def before(_: nn.Module, args: Any) -> Any:
        x, valid = args  # (B, S/n, H) with sequence parallelism, else (B, S, H); valid (B, S)
        x = x if sequence_parallel else split_to(x, 1, group)
        return x, valid.chunk(group.size(), dim=1)[group.rank()]

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        y, stats = output
        return y if sequence_parallel else gather_from(y, 1, group), _complete(stats, group)

    # The shared expert is dense: it stays sharded over tp and gathers the slices of positions itself.
    stream: Placement = Shard(1)
    for moe in list_moe_layers(model):
        if moe.shared is not None:
            parallelize_mlp(moe.shared, mesh, stream)
        moe.register_forward_pre_hook(before)
        moe.register_forward_hook(after)


def apply_gathered_slices(model: nn.Module, group: ProcessGroup) -> None:
    """Make every MoE gather the tokens of `group`, whose ranks hold slices of the same experts (etp not tp).

    Call it after the experts have been sharded.
    """
    for moe in list_moe_layers(model):
        moe.dispatcher = GatheringDispatcher(moe.dispatcher, group)


class GatheringDispatcher:
    """Dispatcher that runs sliced experts on the tokens of all ranks of `group`, which have different tokens.

    Backward: token gradients are gathered, and the gradients of gathered tensors are summed.
    """

    def __init__(self, inner: Dispatcher, group: ProcessGroup) -> None:
        self.inner = inner
        self.group = group

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction) -> Tensor:
        """Return the sum over k of each token's expert outputs times combine weights.

        Shapes: x (N, H), ids and weights (N, k); returns (N, H).

        N must be the same on all ranks of the group.
        """
        # (n * N, ...) each. The ranks continue with different slices of the experts, so gradients are
        # summed.
        tokens = all_gather_sum(x, 0, self.group)
        all_ids = all_gather_sum(ids, 0, self.group)
        all_weights = all_gather_sum(weights, 0, self.group)
        return reduce_scatter_from(self.inner(tokens, all_ids, all_weights, experts), 0, self.group)


class SlicedDispatcher:
    """Dispatcher that runs the slices of experts on this rank and sums the outputs over `group`."""

    def __init__(self, inner: Dispatcher, group: ProcessGroup) -> None:
        self.inner = inner
        self.group = group

    @seam
    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction) -> Tensor:
        """Return the sum over k of each token's expert outputs times combine weights.

        Shapes: x (N, H), ids and weights (N, k); returns (N, H).
        """
        # Each output is a partial sum over hidden units, and so are the gradients of x and the combine
        # weights.
        partial = self.inner(copy_to(x, self.group), ids, copy_to(weights, self.group), experts)
        return reduce_from(partial, self.group)


def slice_positions(positions: Indices, group: ProcessGroup) -> Indices:
    """Return the positions of this rank that its routers process under `apply_token_slices`."""
    size = len(positions) // group.size()
    return as_indices(positions[group.rank() * size : (group.rank() + 1) * size])


@seam
def partial_parameters(model: nn.Module, *, tokens: bool) -> list[Tensor]:
    """Return the MoE parameters whose gradient on each tp rank is an unreduced partial sum.

    With `tokens` these are all parameters that process the tokens of one rank only: routers, shared gates,
    and experts that are not spread over ep or etp. Without it these are the expert biases.
    """
    found: list[Tensor] = []
    for moe in list_moe_layers(model):
        if tokens:
            found += list(moe.router.parameters())
            found += list(moe.shared_gate.parameters()) if moe.shared_gate is not None else []
            if not moe.experts.row_blocks:
                found += [weight for weight in moe.experts.parameters() if not isinstance(weight, DTensor)]
        else:
            found += partial_biases(moe)
    return found


def partial_biases(model: nn.Module) -> list[Tensor]:
    """Return the expert biases whose gradient must be summed over etp; it is zero on all ranks but one."""
    biases = [moe.experts.down_bias for moe in list_moe_layers(model)]
    return [bias for bias in biases if bias is not None]


def _complete(stats: RouterStats, group: ProcessGroup) -> RouterStats:
    # `reduce_from` passes its gradient unchanged: all ranks compute the same losses from the sums.
    return RouterStats(
        reduce_from(stats.probability_sum, group),
        sum_over(stats.counts, group),
        reduce_from(stats.z_sum, group),
    )
