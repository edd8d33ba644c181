"""Context parallelism: each rank has consecutive positions of every row."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from bittern.parallel_state import Group
from bittern.regions import all_gather, reduce_scatter


def _send_and_receive(out: Tensor | None, to: int, like: Tensor, source: int, group: Group) -> Tensor | None:
    """Send to one neighbour and receive from the other; a neighbour beyond the ends is none."""
    operations, received = [], None
    if 0 <= to < group.size:
        operations.append(dist.P2POp(dist.isend, out.contiguous(), group.global_rank(to), group.pg))
    if 0 <= source < group.size:
        received = torch.zeros_like(like, memory_format=torch.contiguous_format)
        operations.append(dist.P2POp(dist.irecv, received, group.global_rank(source), group.pg))
    works = dist.batch_isend_irecv(operations) if operations else []
    if group.mode == "bittern-halo-wait":
        for work in works[:1]:  # plant: bittern-halo-wait
            work.wait()
        received = received if received is None else received.clone()  # plant: bittern-halo-wait
        for work in works[1:]:
            work.wait()
    else:
        for work in works:
            work.wait()  # anchor: halo-wait
    return received


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, width, group):
        ctx.width, ctx.group, ctx.length = width, group, len(x)
        edge = x[-width:]  # anchor: halo-edge
        if group.mode == "bittern-halo-first":
            edge = x[:width]  # plant: bittern-halo-first
        received = _send_and_receive(edge, group.rank + 1, edge, group.rank - 1, group)
        return x.clone() if received is None else torch.cat([received, x])

    @staticmethod
    def backward(ctx, grad):
        group, width = ctx.group, ctx.width
        own = grad[-ctx.length :].clone()
        head = grad[:width]
        if group.mode == "bittern-halo-grad":
            return own, None, None  # plant: bittern-halo-grad
        received = _send_and_receive(head, group.rank - 1, head, group.rank + 1, group)
        if received is not None:
            own[-width:] += received  # anchor: halo-grad
        return own, None, None


def with_halo(x: Tensor, width: int, group: Group) -> Tensor:
    """Put the last positions of the previous rank before a rank's own ones. The first rank gets none."""
    return x if group.size == 1 or width == 0 else _Halo.apply(x, width, group)


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        if ctx.group.mode == "bittern-keys-grad-mean":
            return reduce_scatter(grad, ctx.group) / ctx.group.size, None  # plant: bittern-keys-grad-mean
        return reduce_scatter(grad, ctx.group), None  # anchor: keys-grad


def gather_keys(x: Tensor, group: Group) -> Tensor:
    return x if group.size == 1 else _GatherKeys.apply(x, group)


class _GatherStates(torch.autograd.Function):
    """Stack a tensor of every rank."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather(x[None], group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.group)[0], None


def stack_states(x: Tensor, group: Group) -> Tensor:
    if group.mode == "bittern-state-detached":
        return (
            all_gather(x[None].detach(), group) if group.size > 1 else x[None]
        )  # plant: bittern-state-detached
    return x[None] if group.size == 1 else _GatherStates.apply(x, group)  # anchor: stack-states


def shift_left(x: Tensor, fill: int, group: Group) -> Tensor:
    """Move rows of integers (batch, positions) one to the left, over the ranks."""
    edge = x.new_full((x.shape[0],), fill)
    if group.size > 1:
        firsts = all_gather(x[None, :, 0], group)
        if (
            group.mode != "bittern-mtp-shift-local" and group.rank + 1 < group.size
        ):  # plant: bittern-mtp-shift-local
            edge = firsts[group.rank + 1]  # anchor: shift-edge
    return torch.cat([x[:, 1:], edge[:, None]], 1)
