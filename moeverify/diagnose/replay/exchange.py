"""How token copies travel to their experts and back, with one step of the way otherwise.

A rank sorts its copies by expert and sends each rank those of its experts. There they are sorted by expert once more,
and their outputs go back the same way. Each step is a buffer of rows on each rank; a bug puts other rows into one, or
orders it by other counts. Nothing of this changes values, so that a variant is integers alone: for each copy, whose
row an expert was given in its place, and which expert that was.

Letters: M copies of one exchange, n ranks, e experts of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.diagnose.replay import counts
from moeverify.layout.region import Indices
from moeverify.results.change import Change

BEFORE, AFTER = ("sent", "arrived", "sorted"), ("computed", "unsorted", "returned")
"""The buffers before the experts, and those after them."""

PARTS = frozenset({*BEFORE, *AFTER, "there", "back", "there-and-back", counts.PART, "copies", "restored"})
_ORDERS = ("there", "back", "there-and-back")
_SHIFTED = ("addresses", "blocks")  # rows, or the beginnings of blocks of rows, at other addresses
_TRANSPOSED = "transposed-"  # with the number of rows
_MOST_COPIES = 1 << 18

Call = tuple[Tensor, ...]
"""The tokens that each rank of one exchange sends, as numbers in the flattened batch, in its order."""


@dataclass(frozen=True)
class Travelled:
    """For each copy (token * k + choice) of the batch: the copy whose row was computed, and by which expert.

    The expert is `counts.NO_EXPERT` where none has computed it.
    """

    copies: Tensor
    experts: Tensor


def list_calls(
    shares: Sequence[Sequence[tuple[Indices, Indices]]],
    length: int,
    groups: Sequence[Sequence[int]],
    *,
    slices: Sequence[tuple[int, int]],
    gathered: Mapping[int, Sequence[int]],
) -> list[Call]:
    """Return the exchanges of a step: of each micro-batch one for each group of ranks, the same ones once.

    `shares` has rows and positions of each rank's micro-batches, `slices` which of how many parts of the positions
    it routes, and `gathered` the ranks whose tokens it has besides, in their order.
    """
    calls: dict[tuple[tuple[int, ...], ...], Call] = {}
    for micro_batch in range(len(shares[0])):

        def own(rank: int, micro_batch: int = micro_batch) -> Tensor:
            rows, positions = (torch.tensor(tuple(each)) for each in shares[rank][micro_batch])
            number, count = slices[rank]
            part = positions.chunk(count)[number]
            return (rows.unsqueeze(1) * length + part).flatten()

        for group in groups:
            call = tuple(torch.cat([own(each) for each in gathered.get(rank, (rank,))]) for rank in group)
            calls[tuple(tuple(tokens.tolist()) for tokens in call)] = call
    return list(calls.values())


class Exchanges:
    """All exchanges of a batch with choices `ids` (tokens, k) of `num_experts`."""

    def __init__(self, calls: Sequence[Call], ids: Tensor, num_experts: int) -> None:
        self.ids, self.num_experts = ids, num_experts
        tokens = (
            torch.cat([torch.cat(call) for call in calls]) if calls else torch.zeros(0, dtype=torch.int64)
        )
        is_whole = torch.equal(tokens.sort().values, torch.arange(len(ids)))
        sizes = {len(call) for call in calls}
        is_even = all(num_experts % size == 0 for size in sizes)
        self.calls = calls if is_whole and is_even and ids.numel() <= _MOST_COPIES else ()
        self._num_ranks = max(sizes, default=1)
        self._travelled: dict[tuple[str, str, float | None], Travelled] = {}

    def list_ways(self) -> list[Change]:
        """Return the ways in which one step may be otherwise; none where the exchanges are not known."""
        if not self.calls:
            return []
        longest = max(sum(map(len, call)) for call in self.calls) * self.ids.shape[1]
        limits = [2**power for power in range(2, 20) if 2**power < longest]
        found = []
        for part in (*BEFORE, *AFTER):
            found += [Change(part=part, way="rolled", number=number) for number in (1, -1)]
            found += [Change(part=part, way=way) for way in ("reversed", *self._list_turns())]
            found += [Change(part=part, way="modulo", number=limit) for limit in limits]
        for part in _ORDERS:
            ways = ["skipped", "inverse"] if part != "there-and-back" else ["skipped"]
            ways += [*self._list_turns(), "experts-reversed", "experts-rolled"]
            ways += ["exchanged"] if 1 < self._num_ranks < self.num_experts else []
            found += [Change(part=part, way=way) for way in ways]
            # From other rows in one of the two orders is the same as with its rows rolled.
            shifted = _SHIFTED if part == "there-and-back" else _SHIFTED[1:]
            found += [Change(part=part, way=way, number=n) for way in shifted for n in (1, -1)]
        found += counts.list_counts(self._num_ranks, self.num_experts // self._num_ranks)
        found += [Change(part="copies", way=way) for way in ("unsorted", "inverse", "by-remainder")]
        return found + [Change(part="restored", way=way) for way in ("order", "skipped")]

    def _list_turns(self) -> list[str]:
        if self._num_ranks == 1:
            return []
        transposed = [f"{_TRANSPOSED}{n}" for n in range(2, self._num_ranks) if self._num_ranks % n == 0]
        return ["ranks-reversed", *(["ranks-rolled"] if self._num_ranks > 2 else []), *transposed]

    def travel(self, change: Change) -> Travelled:
        """Return what each copy comes back with."""
        key = (change.part, change.way, change.number)
        if key not in self._travelled:
            copies = torch.empty(self.ids.numel(), dtype=torch.int64)
            experts = torch.empty_like(copies)
            for call in self.calls:
                _Walk(call, self.ids, self.num_experts, change).put(copies, experts)
            self._travelled[key] = Travelled(copies, experts)
        return self._travelled[key]


class _Walk:
    """One exchange. Copies stand by the rank that sends them, there by token and then choice."""

    def __init__(self, call: Call, ids: Tensor, num_experts: int, change: Change) -> None:
        self.change, choices = change, ids.shape[1]
        tokens = torch.cat(call)
        self.copies = (tokens.unsqueeze(1) * choices + torch.arange(choices)).flatten()
        self.source = torch.cat([torch.full((len(each) * choices,), n) for n, each in enumerate(call)])
        self.expert = ids.flatten()[self.copies]
        self.size = len(call)
        self.per_rank = num_experts // self.size
        self.choices = choices

    def put(self, copies: Tensor, experts: Tensor) -> None:
        """Write down what comes back for the copies of this exchange."""
        change = self.change
        by_source = (self.source * (int(self.expert.max()) + 1) + self.expert).argsort(stable=True)
        given = {"unsorted": torch.arange(len(by_source)), "inverse": _invert(by_source)}
        content = given.get(change.way, by_source) if change.part == "copies" else by_source
        if change.part == "copies" and change.way == "by-remainder":
            content = self._take_by_remainder(by_source)
        source, owner = self.source[by_source], self.expert[by_source] // self.per_rank
        arrived = owner.argsort(stable=True)
        came_from, here = source[arrived], owner[arrived]
        expert = self.expert[by_source][arrived]
        by_expert = expert.argsort(stable=True)
        content = content[self._fill("sent", source, owner)][arrived]
        content = content[self._fill("arrived", here, came_from)]
        content = content[self._shift("there", here, self._order("there", came_from, expert, by_expert))]
        content = content[self._fill("sorted", here, None)]
        computed = self._count(expert[by_expert], here, came_from)
        row = torch.arange(len(content))[self._fill("computed", here, None)]
        back = _invert(self._order("back", came_from, expert, by_expert))
        row = row[self._shift("back", here, back)]
        row = row[self._fill("unsorted", here, came_from)][_invert(arrived)]
        row = row[self._fill("returned", source, owner)]
        if change.part != "restored":
            row = row[_invert(by_source)]
        elif change.way == "order":
            row = row[by_source]
        copies[self.copies] = self.copies[content[row]]
        experts[self.copies] = computed[row]

    def _take_by_remainder(self, by_source: Tensor) -> Tensor:
        """Return copies whose token is a place modulo the number of tokens, not divided by that of choices."""
        found = by_source.clone()
        for rank in range(self.size):
            own = (self.source == rank).nonzero().flatten()
            if len(own):
                start, count = int(own[0]), len(own) // self.choices
                inside = self.source[by_source] == rank
                found[inside] = start + (by_source[inside] - start) % count * self.choices
        return found

    def _fill(self, part: str, rank: Tensor, chunk: Tensor | None) -> Tensor:
        """Return the row that stands in the place of each row of the ranks' buffers, which come one after another."""
        places = torch.arange(len(rank))
        if self.change.part != part:
            return places
        found = places.clone()
        for number in range(self.size):
            own = (rank == number).nonzero().flatten()
            if len(own):
                found[own] = own[self._mix(len(own), None if chunk is None else chunk[own])]
        return found

    def _mix(self, count: int, chunk: Tensor | None) -> Tensor:
        """Return which of so many rows stands at each place."""
        way, number, places = self.change.way, int(self.change.number or 0), torch.arange(count)
        ways: dict[str, Callable[[], Tensor]] = {
            "rolled": lambda: places.roll(number),
            "reversed": lambda: places.flip(0),
            "modulo": lambda: places % number,
        }
        if way in ways:
            return ways[way]()
        if chunk is None:
            return places
        return self._turn(way)[chunk].argsort(stable=True)

    def _turn(self, way: str) -> Tensor:
        """Return the place of each rank's rows among those of all, where ranks stand in another order."""
        ranks = torch.arange(self.size)
        if way.startswith(_TRANSPOSED):
            rows = int(way[len(_TRANSPOSED) :])
            return ranks.view(rows, -1).T.flatten() if self.size % rows == 0 else ranks
        return {"ranks-reversed": ranks.flip(0), "ranks-rolled": ranks.roll(1)}.get(way, ranks)

    def _order(self, part: str, came_from: Tensor, expert: Tensor, by_expert: Tensor) -> Tensor:
        """Return the row that stands at each place by expert, where it may be ordered by other counts."""
        change = self.change
        if change.part not in (part, "there-and-back") or change.way in _SHIFTED:
            return by_expert
        if change.way == "skipped":
            return torch.arange(len(by_expert))
        if change.way == "inverse":
            return _invert(by_expert)
        found = by_expert.clone()
        here = expert // self.per_rank
        for rank in range(self.size):
            own = (here == rank).nonzero().flatten()
            if len(own):
                found[own] = own[self._order_by_others(came_from[own], expert[own] % self.per_rank)]
        return found

    def _shift(self, part: str, here: Tensor, order: Tensor) -> Tensor:
        """Return the row that is read for each place, where the addresses on a rank are off.

        All of them by so many rows; or blocks of rows move as they should, and begin so many rows too late.
        """
        change, number = self.change, int(self.change.number or 0)
        if change.part not in (part, "there-and-back") or change.way not in _SHIFTED:
            return order
        found = order.clone()
        for rank in range(self.size):
            own = (here == rank).nonzero().flatten()
            if not len(own):
                continue
            places, rows = torch.arange(len(own)), order[own] - own[0]
            rows = rows + number if change.way == "addresses" else places + (rows - places).roll(number)
            found[own] = own[rows % len(own)]
        return found

    def _order_by_others(self, came_from: Tensor, expert: Tensor) -> Tensor:
        """Return the order of one rank's rows by counts (n, e) whose rows or columns stand in another order."""
        size, per_rank, way = self.size, self.per_rank, self.change.way
        right = torch.bincount(came_from * per_rank + expert, minlength=size * per_rank).view(size, per_rank)
        turned = {
            "experts-reversed": lambda: right.flip(1),
            "experts-rolled": lambda: right.roll(1, 1),
            "exchanged": lambda: right.T.reshape(size, per_rank),
        }
        taken = turned[way]() if way in turned else right[self._turn(way)]
        labels = torch.arange(per_rank).repeat(size).repeat_interleave(taken.flatten())
        return labels.argsort(stable=True)

    def _count(self, expert: Tensor, here: Tensor, came_from: Tensor) -> Tensor:
        """Return the expert that computes each row, which counts of others may say; `NO_EXPERT` where none does.

        `expert` is the right one, `came_from` the rank that sent the row, in the order of arrival.
        """
        if self.change.part != counts.PART:
            return expert
        found, num_experts = expert.clone(), self.size * self.per_rank
        sent = torch.bincount(self.source * num_experts + self.expert, minlength=self.size * num_experts)
        for rank in range(self.size):
            own = (here == rank).nonzero().flatten()
            if len(own):
                given = counts.serve(self.change, counts.RankCounts(sent.view(self.size, -1), rank))
                found[own] = torch.where(given == counts.NO_EXPERT, given, rank * self.per_rank + given)
        return found


def _invert(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter(0, order, torch.arange(len(order)))


def iterate_parts(changes: Mapping[str, Change]) -> Iterator[Change]:
    """Yield the changes that are steps of an exchange."""
    for part, change in changes.items():
        if part in PARTS:
            yield change
