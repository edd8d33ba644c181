"""MoE blocks on the tp and etp axes.

`etp` equal to tp: every rank routes all tokens alike and holds a slice of every expert's hidden units; outputs
are summed. Otherwise tp is lent to the experts: each rank routes its slice of the positions, like a
data-parallel rank. With etp above 1 the ranks that share an expert then gather their tokens, and each gets the
sum of the outputs of its own back.

Letters: B rows, S positions of this cp rank, H hidden, n ranks of tp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from moeverify.layout.region import Indices, as_indices
from moeverify.model.dispatcher import Dispatcher, ExpertFunction
from moeverify.model.moe import MoE
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
from moeverify.parallel.tensor import parallelize_mlp
from moeverify.seams import seam


def apply_expert_slices(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Make every MoE work on all tokens of its tp group with a slice of each expert (etp equal to tp).

    Call it after the experts have been sharded. The gradients that reach x and the combine weights through
    the experts are unreduced partial sums, and are summed over the group; everything else is computed alike on all
    ranks.
    """
    group = mesh.get_group()
    for moe in _moes(model):
        moe.dispatcher = SlicedDispatcher(moe.dispatcher, group)
        if moe.shared is not None:
            parallelize_mlp(moe.shared, mesh, Replicate())
        if sequence_parallel:
            # (B, S/n, H) -> (B, S, H) and back. From here on all ranks compute the same until `SlicedDispatcher`
            # parts them, so each takes its own slice of the gradient.
            moe.register_forward_pre_hook(lambda _, args: (gather_from(args[0], 1, group), *args[1:]))
            moe.register_forward_hook(lambda _, args, out: (split_to(out[0], 1, group), out[1]))


@seam
def apply_token_slices(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Make every MoE work on this rank's slice of the positions (etp not equal to tp).

    The router's sums are completed over the group, since the losses are computed alike on its ranks.
    """
    group = mesh.get_group()

    def before(_: nn.Module, args: Any) -> Any:
        x, valid = args  # (B, S/n, H) under sequence parallelism, else (B, S, H); valid (B, S)
        x = x if sequence_parallel else split_to(x, 1, group)
        return x, valid.chunk(group.size(), dim=1)[group.rank()]

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        y, stats = output
        return y if sequence_parallel else gather_from(y, 1, group), _complete(stats, group)

    # The shared expert is dense: it stays sharded over tp, and gathers the slices of positions for itself.
    stream: Placement = Shard(1)
    for moe in _moes(model):
        if moe.shared is not None:
            parallelize_mlp(moe.shared, mesh, stream)
        moe.register_forward_pre_hook(before)
        moe.register_forward_hook(after)


def apply_gathered_slices(model: nn.Module, group: ProcessGroup) -> None:
    """Make every MoE gather the tokens of `group`, whose ranks hold slices of the same experts (etp not tp).

    Call it after the experts have been sharded.
    """
    for moe in _moes(model):
        moe.dispatcher = GatheringDispatcher(moe.dispatcher, group)


class GatheringDispatcher:
    """Lets an inner dispatcher run sliced experts on the tokens of all ranks of `group`; each has other tokens.

    Backward: the gradients of a token are gathered, and those of what was gathered summed.
    """

    def __init__(self, inner: Dispatcher, group: ProcessGroup) -> None:
        self.inner = inner
        self.group = group

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction) -> Tensor:
        """Return the weighted sum (N, H) of the chosen experts' outputs for x (N, H), ids and weights (N, k).

        N is the same on all ranks of the group.
        """
        # (n * N, ...) each. The ranks go on with other slices of the experts, so gradients are summed.
        tokens = all_gather_sum(x, 0, self.group)
        all_ids = all_gather_sum(ids, 0, self.group)
        all_weights = all_gather_sum(weights, 0, self.group)
        return reduce_scatter_from(self.inner(tokens, all_ids, all_weights, experts), 0, self.group)


class SlicedDispatcher:
    """Lets an inner dispatcher run experts of which this rank holds slices, and sums the outputs."""

    def __init__(self, inner: Dispatcher, group: ProcessGroup) -> None:
        self.inner = inner
        self.group = group

    @seam
    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction) -> Tensor:
        """Return the weighted sum (N, H) of the chosen experts' outputs for x (N, H), ids and weights (N, k)."""
        # Each output is a partial sum over hidden units, and so is each gradient of x and of the combine weights.
        partial = self.inner(copy_to(x, self.group), ids, copy_to(weights, self.group), experts)
        return reduce_from(partial, self.group)


def slice_positions(positions: Indices, group: ProcessGroup) -> Indices:
    """Return which of this rank's positions its routers see under `apply_token_slices`."""
    size = len(positions) // group.size()
    return as_indices(positions[group.rank() * size : (group.rank() + 1) * size])


@seam
def partial_parameters(model: nn.Module, *, tokens: bool) -> list[Tensor]:
    """Return the MoE parameters whose gradient on each rank of tp is an unreduced partial sum.

    With `tokens` these are all that see the tokens of one rank, experts included unless they are spread over
    ep or etp: those see the tokens of all ranks that share them.
    """
    found: list[Tensor] = []
    for moe in _moes(model):
        if tokens:
            found += list(moe.router.parameters())
            found += list(moe.shared_gate.parameters()) if moe.shared_gate is not None else []
            if not moe.experts.row_blocks:
                found += [weight for weight in moe.experts.parameters() if not isinstance(weight, DTensor)]
        else:
            found += partial_biases(moe)
    return found


def partial_biases(model: nn.Module) -> list[Tensor]:
    """Return the expert biases whose gradient is to be summed over etp: one rank has all of it, the others zero."""
    biases = [moe.experts.down_bias for moe in _moes(model)]
    return [bias for bias in biases if bias is not None]


def _complete(stats: RouterStats, group: ProcessGroup) -> RouterStats:
    # Sums pass their gradient on unchanged: all ranks compute the same losses of them, once.
    return RouterStats(
        reduce_from(stats.probability_sum, group),
        sum_over(stats.counts, group),
        reduce_from(stats.z_sum, group),
    )


def _moes(model: nn.Module) -> Iterator[MoE]:
    for module in model.modules():
        if isinstance(module, MoE):
            yield module
