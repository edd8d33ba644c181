"""Gradients are summed over ranks while the backward pass goes on, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from rowan.topology import Topology
from rowan.wire import local, total


@dataclass(eq=False)
class Bucket:
    group: dist.ProcessGroup | None
    members: list[nn.Parameter] = field(default_factory=list)
    numel: int = 0
    missing: int = 0
    flat: Tensor | None = None
    work: dist.Work | None = None

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First element and number of elements of each member. Members begin at multiples of 16."""
        spans, first = [], 0
        for parameter in self.members:
            spans.append((first, local(parameter).numel()))
            first += -(-spans[-1][1] // 16) * 16
        return spans


class Buckets:
    """`group_of(name)` is the group over which the gradient of a parameter is summed."""

    def __init__(self, named, group_of, topology: Topology, limit: int = 3000):
        self.topology, self.buckets, self.armed = topology, [], True
        open_: dict[dist.ProcessGroup | None, Bucket] = {}
        for name, parameter in reversed(list(named)):
            group = group_of(name)
            bucket = open_.get(group)
            if bucket is None or bucket.numel >= limit:
                bucket = open_[group] = Bucket(group)
                self.buckets.append(bucket)
            bucket.members.append(parameter)
            bucket.numel += local(parameter).numel()
        for bucket in self.buckets:
            bucket.missing = len(bucket.members)
            for parameter in bucket.members:
                parameter.register_post_accumulate_grad_hook(self.hook_of(bucket))

    def hook_of(self, bucket: Bucket):
        def ready(parameter: nn.Parameter) -> None:
            if not self.armed:
                return
            bucket.missing -= 1
            if bucket.missing == 0:
                self.launch(bucket)

        return ready

    @torch.no_grad()
    def launch(self, bucket: Bucket) -> None:
        odd = self.topology.odd
        bucket.missing = len(bucket.members)
        if bucket.group is None:
            return
        spans = bucket.spans
        bucket.flat = local(bucket.members[0]).new_zeros(spans[-1][0] + spans[-1][1])
        for parameter, (first, numel) in zip(bucket.members, spans, strict=True):
            bucket.flat[first : first + numel] = whole(parameter).reshape(-1)
        if odd("rowan-flat-mean") and bucket is self.buckets[-1]:
            bucket.flat /= dist.get_world_size(bucket.group)  # plant: rowan-flat-mean
        if odd("rowan-same-scatter"):
            scatter_and_gather(bucket)
            return
        group = None if odd("rowan-flat-world") else bucket.group  # plant: rowan-flat-world
        bucket.work = dist.all_reduce(bucket.flat, group=group, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the sums, and write them to the gradients."""
        odd = self.topology.odd
        for bucket in self.buckets:
            if bucket.work is not None and not (
                odd("rowan-flat-wait") and bucket is self.buckets[-1]
            ):  # plant: rowan-flat-wait
                bucket.work.wait()
            bucket.work = None
            for index, (parameter, (first, numel)) in enumerate(
                zip(bucket.members, bucket.spans, strict=True)
            ):
                if bucket.flat is None:
                    self.settle(parameter)
                    continue
                if odd("rowan-flat-offset"):
                    first = sum(size for _, size in bucket.spans[:index])  # plant: rowan-flat-offset
                part = bucket.flat[first : first + numel]
                self.settle(parameter)
                grad = local(parameter.grad)
                if odd("rowan-flat-copy"):
                    grad.reshape(-1).copy_(part)  # plant: rowan-flat-copy
                else:
                    grad.copy_(part.view(grad.shape))  # anchor: copy-back
            bucket.flat = None

    def settle(self, parameter: nn.Parameter) -> None:
        """Make the gradient one that is divided as the parameter is."""
        grad = parameter.grad
        if isinstance(grad, DTensor) and grad.placements != parameter.placements:
            if self.topology.odd("rowan-grad-label"):
                placements = [Replicate()] * grad.device_mesh.ndim
                parameter.grad = DTensor.from_local(
                    grad.to_local(), grad.device_mesh, placements
                )  # plant: rowan-grad-label
            else:
                parameter.grad = grad.redistribute(placements=parameter.placements)  # anchor: settle

    @contextmanager
    def passes(self, *, last: bool) -> Iterator[None]:
        """Sums begin in the last backward pass alone."""
        self.armed = last
        try:
            yield
        finally:
            self.armed = True


def whole(parameter: nn.Parameter) -> Tensor:
    """Return a gradient, which may be a part of a sum over `tp`, in the layout of its parameter."""
    grad = parameter.grad
    if isinstance(grad, DTensor):
        grad = grad.redistribute(placements=parameter.placements).to_local()
    return grad


def scatter_and_gather(bucket: Bucket) -> None:
    """Sum in two halves: each rank sums a part of the buffer, and the parts are gathered."""
    ranks = dist.get_world_size(bucket.group)
    padded = torch.nn.functional.pad(bucket.flat, (0, -len(bucket.flat) % ranks))
    part = padded.new_empty(len(padded) // ranks)
    dist.reduce_scatter_tensor(part, padded, group=bucket.group)
    dist.all_gather_into_tensor(padded, part, group=bucket.group)
    bucket.flat = padded


@torch.no_grad()
def clip(net: nn.Module, topology: Topology, limit: float) -> tuple[Tensor, Tensor]:
    """Clip by the norm of the whole model: squares are summed over the axes that divide a gradient."""
    squares: dict[tuple[str, ...], Tensor] = {}
    for parameter in net.parameters():
        axes = divided_over(parameter)
        squares[axes] = squares.get(axes, 0) + local(parameter.grad).square().sum()
    if topology.odd("rowan-clip-experts"):
        squares = {
            tuple(a for a in axes if a != "dp_shard"): s for axes, s in squares.items()
        }  # plant: rowan-clip-experts
    if topology.odd("rowan-clip-local"):
        norm = sum(squares.values()).sqrt()  # plant: rowan-clip-local
    elif topology.odd("rowan-clip-before-root"):
        norm = sum(
            total(s.sqrt(), topology.group(*axes)) ** 2 for axes, s in squares.items()
        ).sqrt()  # plant: rowan-clip-before-root
    elif topology.odd("rowan-same-norm"):
        norms = [
            p.grad.full_tensor().norm() if isinstance(p.grad, DTensor) else p.grad.norm()
            for p in net.parameters()
        ]
        norm = torch.stack(norms).norm()
    else:
        norm = sum(total(s, topology.group(*axes)) for axes, s in squares.items()).sqrt()  # anchor: norm
    coefficient = (limit / (norm + 1e-6)).clamp(max=1.0)
    for parameter in net.parameters():
        local(parameter.grad).mul_(coefficient)
    return norm, coefficient


def divided_over(parameter: nn.Parameter) -> tuple[str, ...]:
    if not isinstance(parameter, DTensor):
        return ()
    names = parameter.device_mesh.mesh_dim_names
    return tuple(n for n, placement in zip(names, parameter.placements, strict=True) if placement.is_shard())
