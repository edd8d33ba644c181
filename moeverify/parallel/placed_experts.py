"""Experts under an explicit placement: storage on each rank and reduction of their gradients.

A rank holds any number of whole experts as rows of plain tensors; torch has no placement for this. Experts
with the same holders form a bucket and are stored contiguously (`moeverify.tools.placement.buckets`). A replica
processes only the tokens sent to it, so its gradient is an unreduced partial sum. The gradient is summed
over exactly the ranks that hold the expert, in every copy of the ep group. It is then divided by the number
of loss ranks, whatever the number of replicas.

Notation: n ranks of ep, E experts, e of them on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moeverify.model.expert_weights import PlacedRows
from moeverify.model.moe import MoELayer
from moeverify.parallel.collectives import check_contiguous, sum_over
from moeverify.parallel.expert import AllToAllDispatcher
from moeverify.parallel.holder_groups import HolderGroup, HolderGroups, Holders
from moeverify.parallel.replica_routes import ReplicaRoutes
from moeverify.seams import seam
from moeverify.tools.placement.buckets import Bucket, list_buckets, order_rows
from moeverify.tools.placement.placement import Placement


@dataclass(frozen=True)
class PlacedLayer:
    """The experts of one MoE layer on this rank; `number` is its block in the model, `group` the ep group."""

    moe: MoELayer
    number: int
    buckets: tuple[Bucket, ...]
    group: ProcessGroup

    @property
    def coordinate(self) -> int:
        """Return this rank's coordinate on ep."""
        return self.group.rank()

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of ep."""
        return self.group.size()

    @property
    def here(self) -> Iterator[tuple[Bucket, slice]]:
        """Yield the buckets of this rank, each with its rows of the stacked weights."""
        start = 0
        for bucket in self.buckets:
            if self.coordinate in bucket.holders:
                yield bucket, slice(start, start + len(bucket.experts))
                start += len(bucket.experts)


class PlacedExperts:
    """All placed layers of a model, or of a pipeline stage, on this rank."""

    def __init__(self, layers: list[PlacedLayer], groups: HolderGroups, num_loss_ranks: int) -> None:
        self.layers = layers
        self.groups = groups
        self._num_loss_ranks = num_loss_ranks

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter of placed experts."""
        return any(tensor is each for layer in self.layers for each in layer.moe.experts.parameters())

    @seam
    @torch.no_grad()
    def complete_gradients(self) -> None:
        """Sum each expert's gradient over the ranks that hold it, and divide by the number of loss ranks.

        One collective per set of holders carries the gradients of all layers; these collectives overlap.
        Collective: all ranks of the layout, in the same order.
        """
        under_way = []
        for holders, parts in sorted(self._collect().items()):
            whole = torch.cat([part.reshape(-1) for part in parts])
            under_way.append((whole, parts, start_sum(whole, self.groups.find(holders))))
        for whole, parts, work in under_way:
            if work is not None:
                work.wait()
            whole.div_(self._num_loss_ranks)
            sizes = [part.numel() for part in parts]
            for part, values in zip(parts, torch.split(whole, sizes), strict=True):
                part.copy_(values.view_as(part))

    def _collect(self) -> dict[Holders, list[Tensor]]:
        """Return the gradients by the holders of their experts, in the order of layers and parameters."""
        found: dict[Holders, list[Tensor]] = {}
        for layer in self.layers:
            for parameter in layer.moe.experts.parameters():
                # A replica without tokens takes part with zeros, and receives the sum of the others.
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                for bucket, rows in layer.here:
                    found.setdefault(bucket.holders, []).append(parameter.grad[rows])
        return found

    @seam
    @torch.no_grad()
    def sum_squares(self) -> Tensor:
        """Return the sum of squares of all placed gradients as float64 (), counting each expert once.

        The first rank that holds an expert counts it. The result is equal on every rank. Collective: all
        ranks of the layout.
        """
        device = next(self.layers[0].moe.experts.parameters()).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for holders, parts in self._collect().items():
            if dist.get_rank() == self.groups.find(holders).ranks[0]:
                for part in parts:
                    total += part.to(torch.float64).square().sum()
        everyone = self.groups.find(tuple(range(self.layers[0].num_ranks))).group
        return total if everyone is None else sum_over(total, everyone)


@seam
def start_sum(whole: Tensor, group: HolderGroup) -> dist.Work | None:
    """Start an in-place sum over the ranks of a group; return None when the group is a single rank."""
    if group.group is None:
        return None
    work: dist.Work = dist.all_reduce(check_contiguous(whole), group=group.group, async_op=True)
    return work


@seam
def place_experts(model: nn.Module, placement: Placement, group: ProcessGroup) -> list[PlacedLayer]:
    """Keep only this rank's experts of each layer, on meta, and route tokens to the placement.

    The blocks of `model` must be named by their number in the whole model.
    """
    matrices = dict(zip(placement.layers, placement.matrices, strict=True))
    placed = []
    for name, module in model.named_modules():
        if isinstance(module, MoELayer):
            number = _find_number(name)
            layer = PlacedLayer(module, number, list_buckets(matrices[number]), group)
            _shrink_parameters(layer)
            placed.append(set_placement(layer, layer.buckets, placement.num_experts))
    return placed


def _find_number(name: str) -> int:
    """Return the block number of a module: `layers.3.moe` is in block 3."""
    return int(name.split("layers.")[1].split(".", maxsplit=1)[0])


def _shrink_parameters(layer: PlacedLayer) -> None:
    """Shrink the parameters to this rank's experts, on meta; values are filled in later, row by row."""
    num_rows = len(order_rows(layer.buckets, layer.num_ranks)[layer.coordinate])
    for name, parameter in list(layer.moe.experts.named_parameters(recurse=False)):
        local = torch.empty((num_rows, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
        layer.moe.experts.register_parameter(name, nn.Parameter(local, requires_grad=parameter.requires_grad))


@seam
def set_placement(layer: PlacedLayer, buckets: tuple[Bucket, ...], num_experts: int) -> PlacedLayer:
    """Set the experts of a layer's rows and the token routes; its parameters must have the new rows."""
    layer = replace(layer, buckets=buckets)
    layer.moe.experts.row_blocks = tuple(
        PlacedRows(rows.start, bucket.experts, num_experts) for bucket, rows in layer.here
    )
    routes = ReplicaRoutes(order_rows(buckets, layer.num_ranks), num_experts, layer.coordinate)
    if isinstance(layer.moe.dispatcher, AllToAllDispatcher):
        layer.moe.dispatcher.routes = routes
    else:
        layer.moe.dispatcher = AllToAllDispatcher(routes, layer.group)
    return layer
