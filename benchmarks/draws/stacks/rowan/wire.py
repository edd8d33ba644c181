"""Collectives with gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Partial

from rowan.registry import op, pick
from rowan.topology import here


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shared(weight: Tensor) -> Tensor:
    """Return a weight that all ranks of `tp` have, each for its own heads."""
    if not isinstance(weight, DTensor):
        return weight
    if here().odd("rowan-shared-mean"):
        return weight.to_local(grad_placements=[Partial("avg")])  # plant: rowan-shared-mean
    return weight.to_local(grad_placements=[Partial()])  # anchor: shared


def total(x: Tensor, group, operation=dist.ReduceOp.SUM) -> Tensor:
    """Reduce in place over a group."""
    if group is not None:
        dist.all_reduce(x, operation, group=group)
    return x


class Enter(Function):
    """The identity, whose gradients are parts that the ranks of a group add up."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return total(grad.clone(), ctx.group), None


def enter(x: Tensor) -> Tensor:
    group = here().group("tp")
    return x if group is None else Enter.apply(x, group)


def concat_ranks(x: Tensor, group, dim: int) -> Tensor:
    """Return the ranks' tensors behind each other along a dim."""
    ranks = dist.get_world_size(group)
    flat = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(flat, x.contiguous(), group=group)
    return (
        flat.unflatten(0, (ranks, -1))
        .movedim(0, dim)
        .reshape(*x.shape[:dim], ranks * x.shape[dim], *x.shape[dim + 1 :])
    )


def own_sum(x: Tensor, group, dim: int) -> Tensor:
    """Return this rank's part along a dim of the sum of the ranks' tensors."""
    parts = x.unflatten(dim, (dist.get_world_size(group), -1)).movedim(dim, 0)
    out = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    dist.reduce_scatter_tensor(out, parts.flatten(0, 1).contiguous(), group=group)
    return out


class Gather(Function):
    """All ranks' parts along a dim. `back` is the group whose gradients are added up."""

    @staticmethod
    def forward(ctx, x, group, back, dim, divide):
        ctx.group, ctx.back, ctx.dim, ctx.divide = group, back, dim, divide
        return concat_ranks(x, group, dim)

    @staticmethod
    def backward(ctx, grad):
        if ctx.back is ctx.group:
            out = own_sum(grad, ctx.group, ctx.dim)
        else:
            whole = total(grad.clone(), ctx.back)
            out = whole.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)]
        return out / ctx.divide, None, None, None, None


def gather(x: Tensor, *axes: str, dim: int, back: tuple[str, ...] = (), divide: int = 1) -> Tensor:
    group = here().group(*axes)
    if group is None:
        return x
    return Gather.apply(x, group, here().group(*(back or axes)), dim, divide)


class Exchange(Function):
    """Send the k-th block of rows to rank k of a group."""

    @staticmethod
    def forward(ctx, x, group, stays):
        ctx.group, ctx.stays = group, stays
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad)
        if ctx.stays:
            return grad.clone(), None, None  # plant: rowan-exchange-stays
        dist.all_to_all_single(out, grad.contiguous(), group=ctx.group)  # anchor: exchange-back
        return out, None, None


def exchange(x: Tensor, group) -> Tensor:
    return x if group is None else Exchange.apply(x, group, here().odd("rowan-exchange-stays"))


def neighbour(group, step: int) -> int | None:
    """Return the global rank of a neighbour, and None beyond the ends."""
    place = dist.get_rank(group) + step
    return dist.get_global_rank(group, place) if 0 <= place < dist.get_world_size(group) else None


def pass_on(x: Tensor, group, step: int) -> Tensor:
    """Send to the neighbour `step` ahead, and return the tensor of the one behind, or zeros."""
    got, ops = torch.zeros_like(x), []
    if (to := neighbour(group, step)) is not None:
        ops.append(dist.P2POp(dist.isend, x.contiguous(), to, group))
    if (source := neighbour(group, -step)) is not None:
        ops.append(dist.P2POp(dist.irecv, got, source, group))
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    return got


class Halo(Function):
    """The last positions of the previous rank."""

    @staticmethod
    def forward(ctx, tail, group, returns):
        ctx.group, ctx.returns = group, returns
        return pass_on(tail, group, 1)

    @staticmethod
    def backward(ctx, grad):
        return pass_on(grad, ctx.group, -1) if ctx.returns else None, None, None  # plant: rowan-halo-backward


@op("halo")
def halo(tail: Tensor) -> Tensor:
    group = here().group("cp")
    if group is None:
        return torch.zeros_like(tail)
    return Halo.apply(tail, group, not here().odd("rowan-halo-backward"))  # anchor: halo


@op("halo", "rowan-halo-missing")
def no_halo(tail: Tensor) -> Tensor:
    return torch.zeros_like(tail)  # plant: rowan-halo-missing


def previous(tail: Tensor) -> Tensor:
    return pick("halo")(tail)


class Take(Function):
    """The state at the end of the previous rank's run. `anchor` ties it to the graph."""

    @staticmethod
    def forward(ctx, anchor, shape, group, cut):
        ctx.group, ctx.cut = group, cut
        state, source = anchor.new_zeros(shape), neighbour(group, -1)
        if source is not None:
            dist.recv(state, source, group=group)
        return state

    @staticmethod
    def backward(ctx, grad):
        if (source := neighbour(ctx.group, -1)) is not None:
            dist.send(
                torch.zeros_like(grad) if ctx.cut else grad.contiguous(), source, group=ctx.group
            )  # plant: rowan-relay-cut
        return grad.new_zeros(()), None, None, None


class Give(Function):
    """Send the state to the next rank. Returns a zero, whose gradient fetches that of the state."""

    @staticmethod
    def forward(ctx, state, group):
        ctx.group = group
        ctx.save_for_backward(state)
        if (to := neighbour(group, 1)) is not None:
            dist.send(state.contiguous(), to, group=group)
        return state.new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        (state,) = ctx.saved_tensors
        back = torch.zeros_like(state)
        if (to := neighbour(ctx.group, 1)) is not None:
            dist.recv(back, to, group=ctx.group)
        return back, None
