"""Expert parallelism: experts are sharded over the ep axis, and tokens are dispatched to them.

Forward of one MoE layer on n ranks, with e experts per rank and P slots (one expert each) on all ranks
together:
1. Each rank sorts its token copies by destination slot, which gives counts c (P).
2. The ranks exchange counts, then copies (uneven all-to-all), and compute the shared expert meanwhile.
3. Each rank sorts the received copies by local expert, computes, and sends the outputs back the same way.

Backward: the transposed exchanges. A rank processes every token of its experts, so the gradient of an
expert is already summed over ep. Only the sum over the ranks that hold the same experts remains.

Without a placement a rank has E/n consecutive experts, and slots equal experts. With a placement
(`moeverify.parallel.placed_experts`) an expert may occupy slots on several ranks.

Source: GShard (arXiv 2006.16668); dropless as in MegaBlocks (arXiv 2211.15841).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from moeverify.model.moe import list_moe_layers
from moeverify.parallel.collectives import Exchange, check_contiguous, exchange_rows
from moeverify.parallel.replica_routes import EqualBlocks, ReplicaRoutes
from moeverify.seams import seam

# The dim of each expert parameter that indexes hidden units, which etp shards.
_HIDDEN_DIM = {"gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1}


class AllToAllDispatcher(Overlapping):
    """Dispatcher to the experts of all ranks of `group` by uneven all-to-all; `routes` map copies to slots.

    The host waits for the device once per call, for the sizes of the exchange. The gather of the tokens is
    queued before that wait. `meanwhile` and its backward overlap with the exchange of tokens.
    """

    def __init__(self, routes: EqualBlocks | ReplicaRoutes, group: ProcessGroup) -> None:
        self.routes = routes
        self.group = group

    @seam
    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction) -> Tensor:
        """Return the sum over k of each token's expert outputs times combine weights.

        Shapes: x (N, H), ids and weights (N, k); returns (N, H).
        """
        counts, order = self.routes.sort(ids)  # (P), (N * k)
        arriving = exchange_counts(counts, self.routes.num_slots, self.group)  # (n, e): from each rank
        leaving = torch.stack(
            [part.sum() for part in torch.split(counts, list(self.routes.num_slots))]
        )  # (n)
        # An uneven all-to-all needs its sizes on the host. They are copied while the device gathers.
        sizes = EarlyCopy(torch.stack([leaving, arriving.sum(dim=1)]))
        copies = gather_copies(x, order)
        send, receive = sizes.read()
        exchange = Exchange(copies, receive, send, self.group)
        # Rows arrive by rank, then expert; the experts need them by expert. Each permutation is the
        # backward of the other: `there` is applied before the experts, `back` after them.
        there, back = order_by_expert(arriving, sum(receive))
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        outputs = experts(permute_rows(exchange.finish(), there, back), arriving.sum(dim=0))
        unsorted = permute_rows(outputs, back, there)  # by rank again, the order in which rows are sent back
        return unpermute(exchange_rows(unsorted, send, receive, self.group), order, weights)


MakeDispatcher = Callable[[int, ProcessGroup], Dispatcher]
"""Constructor of a dispatcher from (number of experts, group); each rank has equally many experts."""


def make_sized(num_experts: int, group: ProcessGroup) -> AllToAllDispatcher:
    """Return the dispatcher for equal blocks of experts that exchanges only the existing rows."""
    return AllToAllDispatcher(EqualBlocks(num_experts, group.size()), group)


class EarlyCopy:
    """Asynchronous copy of integers to the host; `read` does not wait for work that was queued after it."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = values
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> Any:
        """Wait for the copy and return the values as nested Python lists."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


@seam
def exchange_counts(counts: Tensor, num_slots: Sequence[int], group: ProcessGroup) -> Tensor:
    """Return the number of copies that each rank sends to each slot of this rank.

    Shapes: counts (P) int64, the copies that this rank sends to each slot; `num_slots` (n), summing to P;
    returns (n, e) int64.
    """
    here = num_slots[group.rank()]
    arriving = counts.new_empty(group.size(), here)
    dist.all_to_all_single(
        arriving.view(-1), check_contiguous(counts), [here] * group.size(), list(num_slots), group=group
    )
    return arriving


@seam
def order_by_expert(arriving: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the permutation from (rank, expert) order to (expert, rank) order, and its inverse.

    No sort is needed: each (rank, expert) block of rows moves as a whole, so all rows of a block have the
    same offset.

    Shapes: arriving (n, e) counts that sum to `num_rows`; returns (num_rows) int64 twice.
    """
    by_rank, by_expert = arriving.flatten(), arriving.t().flatten()
    starts_by_rank = (by_rank.cumsum(0) - by_rank).view_as(arriving)
    starts_by_expert = (by_expert.cumsum(0) - by_expert).view_as(arriving.t()).t()
    # The offset of each (rank, expert) block: index in rank order minus index in expert order. (n, e)
    way = starts_by_rank - starts_by_expert
    places = torch.arange(num_rows, device=arriving.device)
    # With `output_size` the device need not report the length of the result to the host.
    there = places + way.t().flatten().repeat_interleave(by_expert, output_size=num_rows)
    back = places - way.flatten().repeat_interleave(by_rank, output_size=num_rows)
    return there, back


@seam
def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh, make_dispatcher: MakeDispatcher) -> None:
    """Shard the experts of every MoE over the axes `ep` (experts) and `etp` (each expert's hidden units).

    Every expert parameter becomes a DTensor: Shard(0) on ep, and Shard of its hidden dim on etp.
    `down_bias` is replicated on etp and added by one rank only. `mesh` has the axes ep, etp or both, from
    the sparse view. `make_dispatcher` makes the dispatcher over ep. A block whose package divides its own
    experts does so over ep.
    """
    axes = mesh.mesh_dim_names or ()
    for block in [module for module in model.modules() if isinstance(module, DividesExperts)]:
        _divide_by_package(block, mesh["ep"])
    for moe in list_moe_layers(model):
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
    """Return the local tensor of a DTensor parameter, differentiably; return other tensors unchanged."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _shard_parameters(experts: Experts, mesh: DeviceMesh) -> None:
    for name, parameter in list(experts.named_parameters(recurse=False)):
        placements: list[Placement] = []
        shape = list(parameter.shape)
        # One placement for each mesh axis, in mesh order, and the resulting local shape.
        for axis in mesh.mesh_dim_names or ():
            dim = 0 if axis == "ep" else _HIDDEN_DIM.get(name)
            placements.append(Replicate() if dim is None else Shard(dim))
            if dim is not None:
                shape[dim] //= mesh[axis].size()
        # On meta: values are filled in later, slice by slice.
        local = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        sharded = DTensor.from_local(local, mesh, placements, run_check=False)
        experts.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
