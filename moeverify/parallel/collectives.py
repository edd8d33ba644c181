"""Autograd collectives with an explicit backward for each.

All inputs and outputs are contiguous tensors. gloo silently reduces the storage of a strided view instead
of the view (pytorch #192920).

The correct backward depends on the computation that follows, which autograd cannot see:

- If every rank continues with the same computation on a gathered or summed value, each rank has the whole
  gradient. It is used once (slice or keep).
- If the ranks continue with different computations, each rank has an unreduced partial gradient. The
  partials are summed.

Notation: the group has n ranks; x_r is the input of rank r.
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

# torch 2.13 renamed these two and warns about the names of torch 2.11.
GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def check_contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor unchanged.

    Raises: ValueError when it is a strided view.
    """
    if not tensor.is_contiguous():
        shape, stride = tuple(tensor.shape), tensor.stride()
        raise ValueError(f"a collective needs a contiguous tensor, not shape {shape} with strides {stride}")
    return tensor


@seam
def sum_over(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return sum_r x_r on every rank, without gradient. The input is not modified."""
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(check_contiguous(total), group=group)
    return total


@seam
def copy_to(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return x; the backward sums the gradient over the group (f of Megatron-LM).

    Source: arXiv 1909.08053, section 3. Use it before a computation that differs between the ranks, such as
    a column-parallel projection.
    """
    copied: Tensor = _Map.apply(x, 0, group, _keep, _sum)  # type: ignore[no-untyped-call]
    return copied


@seam
def reduce_from(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return sum_r x_r; the backward passes the gradient through unchanged (g of Megatron-LM).

    Use it before a computation that is identical on all ranks, such as the residual stream.
    """
    total: Tensor = _Map.apply(x, 0, group, _sum, _keep)  # type: ignore[no-untyped-call]
    return total


@seam
def gather_from(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the x_r concatenated along `dim`; the backward keeps this rank's slice of the gradient.

    Use it when every rank continues with the same computation on the result.
    """
    whole: Tensor = _Map.apply(x, dim, group, _all_gather, _slice)  # type: ignore[no-untyped-call]
    return whole


@seam
def split_to(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's slice of x along `dim`; the backward all-gathers the gradient."""
    part: Tensor = _Map.apply(x, dim, group, _slice, _all_gather)  # type: ignore[no-untyped-call]
    return part


@seam
def reduce_scatter_from(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's slice of sum_r x_r along `dim`; the backward all-gathers the gradient."""
    part: Tensor = _Map.apply(x, dim, group, _reduce_scatter, _all_gather)  # type: ignore[no-untyped-call]
    return part


@seam
def all_gather_sum(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the x_r concatenated along `dim`; the backward reduce-scatters the gradient.

    Use it when the ranks continue with different computations on the result.
    """
    whole: Tensor = _Map.apply(x, dim, group, _all_gather, _reduce_scatter)  # type: ignore[no-untyped-call]
    return whole


@seam
def exchange_rows(x: Tensor, receive: Sequence[int], send: Sequence[int], group: ProcessGroup) -> Tensor:
    """Return the rows that all ranks send to this rank, in rank order; the backward sends gradients back.

    Shapes: x (sum(send), ...); returns (sum(receive), ...). `send[r]` is the number of rows sent to rank r,
    and `receive[r]` the number of rows received from it.
    """
    rows: Tensor = _Exchange.apply(x, list(receive), list(send), group)  # type: ignore[no-untyped-call]
    return rows


class Exchange:
    """Asynchronous `exchange_rows`: the computation between construction and `finish` overlaps with it.

    The backward exchange overlaps with the backward of the same computation. One instance serves one
    forward and one backward pass. Collective: like `exchange_rows`.
    """

    def __init__(self, x: Tensor, receive: Sequence[int], send: Sequence[int], group: ProcessGroup) -> None:
        self._receive, self._send, self._group = list(receive), list(send), group
        self._under_way: tuple[Tensor, Tensor, Any] | None = None
        self._rows: Tensor | None = _Start.apply(x, self)  # type: ignore[no-untyped-call]

    def finish(self) -> Tensor:
        """Return the received rows (sum(receive), ...). On a GPU the device waits for them; the host does not."""
        rows: Tensor = _Finish.apply(self._rows, self)  # type: ignore[no-untyped-call]
        # The autograd graph refers to this exchange, and the rows refer to the graph. This reference cycle
        # would keep everything before the rows alive until Python's next garbage collection, possibly many
        # steps later on a GPU.
        self._rows = None
        return rows

    def start(self, x: Tensor, *, back: bool) -> Tensor:
        """Start sending x and return the buffer for the received rows."""
        receive, send = (self._send, self._receive) if back else (self._receive, self._send)
        sent, rows = check_contiguous(x.contiguous()), x.new_empty((sum(receive), *x.shape[1:]))
        work = dist.all_to_all_single(rows, sent, receive, send, group=self._group, async_op=True)
        self._under_way = (rows, sent, work)  # both buffers must live until the exchange is complete
        return rows

    def wait(self) -> Tensor:
        """Wait for the exchange and return the received rows (sum(receive), ...)."""
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
        # The value of `grad` is not used: it only signals that `_Finish` has started the exchange of
        # gradients.
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
    # Always gather along dim 0: only there is each rank's part a contiguous block of memory.
    parts = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    GATHER(parts, check_contiguous(x.contiguous()), group=group)
    return parts if dim == 0 else torch.cat(parts.chunk(group.size()), dim=dim)


def _reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    # Chunk along `dim` and stack along dim 0: the slice of rank r must be the r-th block of memory.
    # `torch.cat` preserves the memory format of its inputs (channels last), so `contiguous` comes after it.
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
    """A linear map of all ranks' values along `dim`, with a separate map for the gradients."""

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
