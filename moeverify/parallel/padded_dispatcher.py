"""Expert parallelism with exchanges of fixed size: the host never waits for the device.

Each rank sends every other rank the maximum number of rows that could be needed. The host needs no sizes
from the device and can queue whole passes ahead. The cost is memory: exchanges and expert activations have
up to n times the rows of `moeverify.parallel.expert`.

Notation: N tokens of this rank, k choices, n ranks, e experts on each, C = N * min(k, e) rows for each pair
of ranks. A buffer has n * C rows. The rows for (or from) rank r start at r * C, sorted by expert and
followed by padding. Padding never reaches a result: every gather moves real rows to real rows, and padding
to padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from moeverify.model.dispatcher import ExpertFunction, Overlapping, permute_rows
from moeverify.parallel.collectives import Exchange, exchange_rows
from moeverify.parallel.expert import exchange_counts
from moeverify.seams import seam


class Departures(NamedTuple):
    """The layout of this rank's token copies in its send buffer.

    Shapes: counts (n * e) int64, copies for each expert; place (N * k) int64, the row of each copy (token *
    k + choice); copy (n * C) int64, the copy in each row, and 0 for padding.
    """

    counts: Tensor
    place: Tensor
    copy: Tensor


class PaddedDispatcher(Overlapping):
    """Dispatcher to the experts of all ranks of `group`, which have equally many experts and tokens each.

    `meanwhile` and its backward overlap with the exchange of tokens.
    """

    def __init__(self, num_experts: int, group: ProcessGroup) -> None:
        self._num_experts = num_experts
        self._group = group
        self._plan = plan_departures
        self._order = order_by_expert

    def compile(self) -> None:
        """Compile the index computation: many operations on few integers, all of fixed sizes."""
        self._plan = torch.compile(plan_departures, dynamic=False)
        self._order = torch.compile(order_by_expert, dynamic=False)

    @seam
    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction) -> Tensor:
        """Return the sum over k of each token's expert outputs times combine weights.

        Shapes: x (N, H), ids and weights (N, k); returns (N, H).
        """
        num_ranks = self._group.size()
        num_here = self._num_experts // num_ranks
        room = ids.shape[0] * min(ids.shape[1], num_here)
        departures = self._plan(ids, num_ranks, num_here, room)
        arriving = exchange_counts(departures.counts, [num_here] * num_ranks, self._group)
        rows = gather_copies(x, departures.copy // ids.shape[1], departures.place)
        sizes = [room] * num_ranks
        exchange = Exchange(rows, sizes, sizes, self._group)
        there, back = self._order(arriving, room)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        outputs = experts(permute_rows(exchange.finish(), there, back), arriving.sum(dim=0))
        returned = exchange_rows(permute_rows(outputs, back, there), sizes, sizes, self._group)
        return combine(returned, weights, departures)


@seam
def plan_departures(ids: Tensor, num_ranks: int, num_here: int, room: int) -> Departures:
    """Return the send-buffer layout of the copies of ids (N, k).

    The copies for each rank are sorted by expert and then token. No sort is needed: a running count of the
    copies of each expert gives the row of each copy.
    """
    experts, ranks = (torch.arange(size, device=ids.device) for size in (num_ranks * num_here, num_ranks))
    chosen = ids.reshape(-1, 1)
    running = (chosen == experts).cumsum(0)  # (N * k, n * e): copies of each expert up to and with this one
    counts = running[-1] if len(running) else running.new_zeros(len(experts))
    by_rank = counts.view(num_ranks, num_here)
    # Start of each expert's copies, (n, e), minus 1 because `running` counts the copy itself.
    starts = by_rank.cumsum(1) - by_rank + (ranks * room - 1).unsqueeze(1)
    place = (running + starts.view(1, -1)).gather(1, chosen).squeeze(1)
    copies = torch.arange(len(place), device=ids.device)
    return Departures(counts, place, copies.new_zeros(num_ranks * room).scatter_(0, place, copies))


@seam
def order_by_expert(arriving: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Return the source row for each place in (expert, rank) order, and the inverse permutation.

    Real rows come first. The entries of padding are arbitrary rows of the buffer.

    Shapes: arriving (n, e) counts; returns (n * C) int64 twice.
    """
    num_ranks = len(arriving)
    places = torch.arange(num_ranks * room, device=arriving.device)
    sizes = arriving.t().reshape(-1)  # (e * n)
    ends = sizes.cumsum(0)
    ranks = torch.arange(num_ranks, device=arriving.device)
    starts = arriving.cumsum(1) - arriving + (ranks * room).unsqueeze(1)  # (n, e): in the buffer
    way = starts.t().reshape(-1) - ends + sizes
    block = torch.searchsorted(ends, places, right=True)
    # One extra row absorbs the padding, which is scattered to it and then cut off.
    there = torch.where(places < ends[-1], places + way[block.clamp_(max=len(way) - 1)], len(places))
    back = places.new_zeros(len(places) + 1).scatter_(0, there, places)[:-1]
    return there.clamp_(max=len(places) - 1), back


def gather_copies(x: Tensor, token: Tensor, place: Tensor) -> Tensor:
    """Return x (N, H)[token] for the rows (n * C) of a buffer; `place` has the row of each copy."""
    rows: Tensor = _GatherPadded.apply(x, token, place)  # type: ignore[no-untyped-call]
    return rows


@seam
def combine(rows: Tensor, weights: Tensor, departures: Departures) -> Tensor:
    """Return the sum over k of weight times output, accumulated in at least float32.

    Shapes: rows (n * C, H), weights (N, k); returns (N, H).
    """
    combined: Tensor = _Combine.apply(rows, weights, departures.place, departures.copy)  # type: ignore[no-untyped-call]
    return combined


class _GatherPadded(Function):
    """A gather whose backward is a gather and a sum over k, in a fixed order on every device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.num_tokens = len(x)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        copies = grad.index_select(0, place).view(ctx.num_tokens, -1, grad.shape[-1])
        return copies.sum(dim=1), None, None


class _Combine(Function):
    """A gather and a batched product in each direction; narrow products accumulate in at least float32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, place: Tensor, copy: Tensor) -> Tensor:
        outputs = rows.index_select(0, place).view(*weights.shape, -1)
        ctx.save_for_backward(outputs, weights, copy)
        return torch.bmm(weights.unsqueeze(1), outputs).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        outputs, weights, copy = ctx.saved_tensors
        of_weights = torch.bmm(outputs, grad.unsqueeze(-1)).squeeze(-1)
        by_row = grad.index_select(0, copy // weights.shape[1])
        return by_row * weights.reshape(-1, 1).index_select(0, copy), of_weights, None, None
