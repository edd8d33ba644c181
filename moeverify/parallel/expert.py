"""Expert parallelism: experts are spread over the ranks of the ep axis, and tokens travel to them and back.

Forward of one MoE layer, n ranks, e experts here; P slots, each with one expert, on all ranks together:
1. every rank sorts its token copies by the slot that they go to: counts c (P);
2. the ranks exchange counts, then copies (uneven all-to-all, sizes first), and compute the shared expert meanwhile;
3. a rank sorts what came in by its own experts, computes, and the outputs travel back the same way.
Backward: the transposed exchanges. A rank sees every token that its experts got, so an expert's gradient is
already the sum over the ep ranks; what remains is the sum over the ranks that hold the same experts.

Without a placement a rank has E/n consecutive experts, and slots are experts. Under one
(`moeverify.parallel.placed_experts`) an expert may be in the slots of several ranks.

Source: GShard (arXiv 2006.16668); dropless as in MegaBlocks (arXiv 2211.15841).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, Replicate

from moeverify.model.dispatcher import (
    Dispatcher,
    ExpertFunction,
    Overlapping,
    gather_copies,
    permute_rows,
    unpermute,
)
from moeverify.model.experts import DividesExperts, Experts
from moeverify.model.moe import MoE
from moeverify.parallel.collectives import Exchange, check_contiguous, exchange_rows
from moeverify.parallel.replica_routes import EqualBlocks, ReplicaRoutes
from moeverify.seams import seam

# The dim of each expert parameter that holds the expert's hidden units, which etp shards.
_HIDDEN_DIM = {"gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1}


class AllToAllDispatcher(Overlapping):
    """Runs the experts of all ranks of `group` on this rank's tokens; `routes` say in which slots they are.

    The host waits for the device once, for the sizes of the exchange: the gather of the tokens is queued before
    it waits. `meanwhile` is computed while the tokens travel, and so is its backward.
    """

    def __init__(self, routes: EqualBlocks | ReplicaRoutes, group: ProcessGroup) -> None:
        self.routes = routes
        self.group = group

    @seam
    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction) -> Tensor:
        """Return the weighted sum (N, H) of the chosen experts' outputs for x (N, H), ids and weights (N, k)."""
        counts, order = self.routes.sort(ids)  # (P), (N * k)
        arriving = exchange_counts(counts, self.routes.num_slots, self.group)  # (n, e): from each rank
        leaving = torch.stack(
            [part.sum() for part in torch.split(counts, list(self.routes.num_slots))]
        )  # (n)
        # On their way to the host while the device gathers: an uneven all-to-all wants its sizes on the host.
        sizes = EarlyCopy(torch.stack([leaving, arriving.sum(dim=1)]))
        copies = gather_copies(x, order)
        send, receive = sizes.read()
        exchange = Exchange(copies, receive, send, self.group)
        # Rows come by rank and then expert; experts want them by expert. Both permutations are needed: `there` before
        # the experts, `back` after them.
        there, back = order_by_expert(arriving, sum(receive))
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        outputs = experts(permute_rows(exchange.finish(), there, back), arriving.sum(dim=0))
        unsorted = permute_rows(outputs, back, there)  # by rank again, as the rows are sent back
        return unpermute(exchange_rows(unsorted, send, receive, self.group), order, weights)


MakeDispatcher = Callable[[int, ProcessGroup], Dispatcher]
"""Makes a dispatcher for so many experts, of which each rank of the group has equally many."""


def make_sized(num_experts: int, group: ProcessGroup) -> AllToAllDispatcher:
    """Return the dispatcher of equal blocks of experts that exchanges no more rows than there are."""
    return AllToAllDispatcher(EqualBlocks(num_experts, group.size()), group)


class EarlyCopy:
    """Integers on their way to the host; `read` waits for them, and not for what was queued after them."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = values
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> Any:
        """Return the values as Python's lists."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


@seam
def exchange_counts(counts: Tensor, num_slots: Sequence[int], group: ProcessGroup) -> Tensor:
    """Return how many copies each rank sends to each slot here.

    Shapes: counts (P) int64, what this rank sends to each slot; `num_slots` (n) sum to P; returns (n, e) int64.
    """
    here = num_slots[group.rank()]
    arriving = counts.new_empty(group.size(), here)
    dist.all_to_all_single(
        arriving.view(-1), check_contiguous(counts), [here] * group.size(), list(num_slots), group=group
    )
    return arriving


@seam
def order_by_expert(arriving: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the permutation that sorts rows, which come by rank and then expert, by expert and then rank.

    And its inverse. Neither is sorted for: blocks of rows move as they are, so a row's way is its block's.

    Shapes: arriving (n, e) counts that sum to `num_rows`; returns (num_rows) int64 twice.
    """
    by_rank, by_expert = arriving.flatten(), arriving.t().flatten()
    starts_by_rank = (by_rank.cumsum(0) - by_rank).view_as(arriving)
    starts_by_expert = (by_expert.cumsum(0) - by_expert).view_as(arriving.t()).t()
    # Blocks of (rank, expert) move as a whole: a row's place by expert plus this is its place by rank. (n, e)
    way = starts_by_rank - starts_by_expert
    places = torch.arange(num_rows, device=arriving.device)
    # With its size known, the device need not tell the host how long the result is.
    there = places + way.t().flatten().repeat_interleave(by_expert, output_size=num_rows)
    back = places - way.flatten().repeat_interleave(by_rank, output_size=num_rows)
    return there, back


@seam
def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh, make_dispatcher: MakeDispatcher) -> None:
    """Shard the experts of every MoE over the axes `ep` (experts) and `etp` (each expert's hidden units).

    Placement: every expert parameter becomes a DTensor, Shard(0) on ep and Shard of its hidden dim on etp
    (`down_bias` is replicated there and added by one rank only). Over ep tokens travel by what `make_dispatcher`
    makes. `mesh` has the axes (ep, etp) that are used, one or both, from the sparse view. A block whose package
    divides its own experts does so over ep.
    """
    axes = mesh.mesh_dim_names or ()
    for block in [module for module in model.modules() if isinstance(module, DividesExperts)]:
        _divide_by_package(block, mesh["ep"])
    for moe in _moes(model):
        _shard_parameters(moe.experts, mesh)
        moe.experts.view = local_view
        if "etp" in axes:
            moe.experts.add_down_bias = mesh.get_local_rank("etp") == 0
        if "ep" in axes:
            moe.dispatcher = make_dispatcher(moe.router.spec.num_experts, mesh.get_group("ep"))


def _divide_by_package(block: DividesExperts, mesh: DeviceMesh) -> None:
    weights = block.divide_experts(mesh.get_group())
    for name, parameter in list(weights.named_parameters(recurse=False)):
        sharded = DTensor.from_local(parameter.detach(), mesh, [Shard(0)], run_check=False)
        weights.register_parameter(name, nn.Parameter(sharded))


def local_view(parameter: Tensor) -> Tensor:
    """Return the local tensor of a DTensor parameter; its gradient becomes a DTensor again."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _moes(model: nn.Module) -> Iterator[MoE]:
    for module in model.modules():
        if isinstance(module, MoE):
            yield module


def _shard_parameters(experts: Experts, mesh: DeviceMesh) -> None:
    for name, parameter in list(experts.named_parameters(recurse=False)):
        placements: list[Placement] = []
        shape = list(parameter.shape)
        # One placement for each axis of the mesh, in its order, and the local shape that they leave.
        for axis in mesh.mesh_dim_names or ():
            dim = 0 if axis == "ep" else _HIDDEN_DIM.get(name)
            placements.append(Replicate() if dim is None else Shard(dim))
            if dim is not None:
                shape[dim] //= mesh[axis].size()
        # On meta: the values come later, slice by slice.
        local = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        sharded = DTensor.from_local(local, mesh, placements, run_check=False)
        experts.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
