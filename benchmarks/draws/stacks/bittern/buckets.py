"""Gradients in flat buckets, which are reduced over the ranks with other tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bittern.parallel_state import Group
from bittern.regions import all_reduce

BUCKET_SIZE = 6000


class Bucket:
    """Parameters of one dtype whose gradients are summed over the same ranks."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], group: Group) -> None:
        self.named, self.group = named, group
        self.flat: Tensor | None = None
        self.work = None

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for _, parameter in self.named)

    @property
    def gradients(self) -> list[Tensor]:
        return [parameter.grad for _, parameter in self.named]

    def launch(self, scale: float) -> None:
        """Begin to sum."""
        grads, mode = self.gradients, self.group.mode
        if self.group.size == 1:
            return
        self.flat = torch.cat([grad.flatten() for grad in grads])  # anchor: flat
        if mode == "bittern-bucket-float32":
            self.flat = torch.cat([grad.flatten().float() for grad in grads])  # plant: bittern-bucket-float32
        if scale != 1.0:
            self.flat.mul_(scale)
        self.work = dist.all_reduce(self.flat, group=self.group.pg, async_op=True)

    def finish(self) -> None:
        """Wait, and write the sums to the gradients."""
        if self.flat is None:
            return
        sizes = [grad.numel() for grad in self.gradients]
        if self.group.mode == "bittern-bucket-wait":
            parts = [part.clone() for part in self.flat.split(sizes)]  # plant: bittern-bucket-wait
            self.work.wait()
        else:
            self.work.wait()  # anchor: bucket-wait
            parts = self.flat.split(sizes)
        for grad, part in zip(self.gradients, parts, strict=True):
            grad.copy_(part.view_as(grad))
        self.flat = self.work = None


def make_buckets(model) -> list[Bucket]:
    """Return buckets of about equal size, the last parameters first as their gradients are ready first."""
    ps, buckets, latest = model.ps, [], {}
    expert_group = ps.edp  # anchor: expert-group
    if ps.mode == "bittern-expert-group":
        expert_group = ps.data  # plant: bittern-expert-group
    for name, parameter in reversed(list(model.named_parameters())):
        expert = model.infos[name].expert
        key = (expert, parameter.dtype)
        if key not in latest or latest[key].numel + parameter.numel() > BUCKET_SIZE:
            latest[key] = Bucket([], expert_group if expert else ps.data)
            buckets.append(latest[key])
        latest[key].named.append((name, parameter))
    return buckets


@torch.no_grad()
def sum_partial(model) -> None:
    """Complete gradients of parameters that the ranks of tp used for their own heads or positions."""
    ps = model.ps
    if ps.tp.size == 1:
        return
    grads = [parameter.grad for name, parameter in model.named_parameters() if model.infos[name].partial]
    flat = all_reduce(torch.cat([grad.flatten() for grad in grads]), ps.tp)
    if ps.mode == "bittern-partial-mean":
        flat = flat / ps.tp.size  # plant: bittern-partial-mean
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))  # anchor: partial


class Reducer:
    """Completes the gradients of a step."""

    def __init__(self, model) -> None:
        self.model, self.ps = model, model.ps
        self.buckets = make_buckets(model)

    def scale_of(self, bucket: Bucket) -> float:
        ps = self.ps
        expert = self.model.infos[bucket.named[0][0]].expert
        if ps.mode == "bittern-dense-mean" and not expert:
            return 1.0 / ps.data.size  # plant: bittern-dense-mean
        if ps.mode == "bittern-expert-mean" and expert:
            return 1.0 / ps.ep.size  # plant: bittern-expert-mean
        return 1.0  # anchor: bucket-scale

    @torch.no_grad()
    def __call__(self) -> None:
        sum_partial(self.model)
        for bucket in self.buckets:
            bucket.launch(self.scale_of(bucket))
        for bucket in self.buckets:
            bucket.finish()
