"""Collectives that carry gradients, each with its backward stated.

All of them take and give contiguous tensors: gloo reduces the storage of a strided view instead of the view,
silently (pytorch #192920).

Which backward is right depends on what follows, and autograd cannot know it. Where every rank goes on to compute
the same from a gathered or summed value, each has the whole gradient, and taking it once is enough (slice, keep).
Where every rank goes on to compute something else, each has an unreduced partial sum of it, and they are summed.

Letters: n ranks in the group; the value of rank r is x_r.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from moeverify.seams import seam

# torch 2.13 renamed these two and warns about the names that 2.11 has.
GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def check_contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor; raise ValueError if it is a strided view."""
    if not tensor.is_contiguous():
        shape, stride = tuple(tensor.shape), tensor.stride()
        raise ValueError(f"a collective needs a contiguous tensor, not shape {shape} with strides {stride}")
    return tensor


@seam
def sum_over(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return sum_r x_r on every rank, without gradient; the input is left as it is."""
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(check_contiguous(total), group=group)
    return total


@seam
def copy_to(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return x; the gradient is summed over the group (f of Megatron-LM, arXiv 1909.08053, section 3).

    Right before a computation that differs between the ranks, such as a projection sharded by columns.
    """
    copied: Tensor = _Map.apply(x, 0, group, _keep, _sum)  # type: ignore[no-untyped-call]
    return copied


@seam
def reduce_from(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return sum_r x_r; the gradient passes unchanged (g of Megatron-LM).

    Right before a computation that is the same on all ranks, such as the residual stream.
    """
    total: Tensor = _Map.apply(x, 0, group, _sum, _keep)  # type: ignore[no-untyped-call]
    return total


@seam
def gather_from(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the x_r concatenated along `dim`; a rank's gradient is its own slice of the incoming one.

    Right where every rank goes on to compute the same from the result.
    """
    whole: Tensor = _Map.apply(x, dim, group, _all_gather, _slice)  # type: ignore[no-untyped-call]
    return whole


@seam
def split_to(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's slice of x along `dim`; the gradient is gathered from all ranks."""
    part: Tensor = _Map.apply(x, dim, group, _slice, _all_gather)  # type: ignore[no-untyped-call]
    return part


@seam
def reduce_scatter_from(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's slice of sum_r x_r along `dim`; the gradient is gathered from all ranks."""
    part: Tensor = _Map.apply(x, dim, group, _reduce_scatter, _all_gather)  # type: ignore[no-untyped-call]
    return part


@seam
def all_gather_sum(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the x_r concatenated along `dim`; gradients are summed over the ranks, then sliced.

    Right where every rank goes on to compute something different from the result.
    """
    whole: Tensor = _Map.apply(x, dim, group, _all_gather, _reduce_scatter)  # type: ignore[no-untyped-call]
    return whole


@seam
def exchange_rows(x: Tensor, receive: Sequence[int], send: Sequence[int], group: ProcessGroup) -> Tensor:
    """Return the rows that the other ranks send here, in rank order; gradients travel back.

    Shapes: x (sum(send), ...); returns (sum(receive), ...). `send[r]` rows go to rank r, `receive[r]` come
    from it.
    """
    rows: Tensor = _Exchange.apply(x, list(receive), list(send), group)  # type: ignore[no-untyped-call]
    return rows


class Exchange:
    """An `exchange_rows` under way; its backward overlaps with that of what is computed before `finish`.

    One forward and one backward pass. Collective: as `exchange_rows`.
    """

    def __init__(self, x: Tensor, receive: Sequence[int], send: Sequence[int], group: ProcessGroup) -> None:
        self._receive, self._send, self._group = list(receive), list(send), group
        self._under_way: tuple[Tensor, Tensor, Any] | None = None
        self._rows: Tensor | None = _Start.apply(x, self)  # type: ignore[no-untyped-call]

    def finish(self) -> Tensor:
        """Return the rows that came in; a GPU waits for them, the host does not."""
        rows: Tensor = _Finish.apply(self._rows, self)  # type: ignore[no-untyped-call]
        # The graph refers to this exchange, and the rows to the graph: a circle would keep both, and all before them in
        # the graph, until Python next looks for circles. On a GPU that can be many steps later.
        self._rows = None
        return rows

    def start(self, x: Tensor, *, back: bool) -> Tensor:
        """Send x off and return where the rows will stand."""
        receive, send = (self._send, self._receive) if back else (self._receive, self._send)
        sent, rows = check_contiguous(x.contiguous()), x.new_empty((sum(receive), *x.shape[1:]))
        work = dist.all_to_all_single(rows, sent, receive, send, group=self._group, async_op=True)
        self._under_way = (rows, sent, work)  # both buffers must live until it is over
        return rows

    def wait(self) -> Tensor:
        """Return the rows when they are there."""
        assert self._under_way is not None
        rows, _, work = self._under_way
        work.wait()
        self._under_way = None
        return rows


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(x, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # What comes is only the sign that `_Finish` has sent the gradients off.
        return ctx.exchange.wait(), None


class _Finish(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start(grad, back=True)
        return grad, None


_Along = Callable[[Tensor, int, ProcessGroup], Tensor]


def _keep(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return sum_over(x, group)


def _all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    # Ranks are gathered along dim 0 whatever `dim` is: only there is the result of each a block of memory.
    parts = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    GATHER(parts, check_contiguous(x.contiguous()), group=group)
    return parts if dim == 0 else torch.cat(parts.chunk(group.size()), dim=dim)


def _reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    # Cut along `dim`, stacked along dim 0: the slice of rank r must be the r-th block of memory. `torch.cat` of what
    # lies in another order of memory (channels last) gives that order again, so it is made contiguous after.
    parts = (x if dim == 0 else torch.cat(x.chunk(group.size(), dim=dim))).contiguous()
    part = x.new_empty((parts.shape[0] // group.size(), *parts.shape[1:]))
    REDUCE_SCATTER(part, check_contiguous(parts), group=group)
    return part


def _slice(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return x.chunk(group.size(), dim=dim)[group.rank()].contiguous()


def _all_to_all(x: Tensor, receive: list[int], send: list[int], group: ProcessGroup) -> Tensor:
    rows = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(rows, check_contiguous(x.contiguous()), receive, send, group=group)
    return rows


class _Map(Function):
    """A linear map of the values of all ranks along `dim`, and the map that its gradients go through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup, there: _Along, back: _Along) -> Tensor:
        ctx.dim, ctx.group, ctx.back = dim, group, back
        return there(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.back(grad, ctx.dim, ctx.group), None, None, None, None


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, receive: list[int], send: list[int], group: ProcessGroup) -> Tensor:
        ctx.receive, ctx.send, ctx.group = receive, send, group
        return _all_to_all(x, receive, send, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, ctx.send, ctx.receive, ctx.group), None, None, None
