"""Which tokens of each call of a module count for the gradient of its parameter, and how often.

A backward pass is written for one call: it leaves out the end of a tile, writes a sum where it should add one, or
reads the last token again to fill a block. So each way is one of the tokens of a call, and the calls are added up.

Letters: b rows, s positions and n heads of one call, N its tokens in all, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from moeverify.diagnose.replay.calls import ModuleCall
from moeverify.results.change import Change

TOKENS, COPIES = "tokens", "expert-rows"
"""The part of a formula: of the tokens of a module, or of the rows that an expert takes."""

_MOST = 48  # up to this many tokens, rows or positions each number of them is tried
_TILES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512)
_FILLED = range(2, 17)
_CHUNKS = (3, 4, 5, 6, 8)
_PERIODS = (2, 3, 4, 5, 6, 8)
_MOST_PLACES = 8
_OF_PLACE = "where"

_FLAT = ("without-last", "without-first", "first-alone", "last-alone", "first-twice", "last-twice")


class CountedTokens:
    """Weighs the tokens of the calls; `valid` has what is no padding, in the shape of all tokens (B, S)."""

    def __init__(
        self,
        calls: Sequence[ModuleCall],
        shape: Sequence[int],
        valid: Tensor | None = None,
        part: str = TOKENS,
    ) -> None:
        self.calls, self.shape, self.part = calls, tuple(shape), part
        valid = None if valid is None or part == COPIES or bool(valid.all()) else valid
        self._valid = None if valid is None else _spread(valid, self.shape).flatten()
        self._sizes = {call.at.numel() for call in calls}

    def list_ways(self) -> list[Change]:
        """Return how other tokens may count, what is simple to say first."""
        ways = [*self._list_flat(), *self._list_tiles()]
        if self.part == TOKENS:
            ways = [*self._list_along("row", 0), *self._list_along("position", 1), *ways]
        if self._valid is not None:
            ways += [self._change("without-padding"), self._change("padding-alone")]
        return [*ways, self._change("mean")]

    def list_places(self) -> list[Change]:
        """Return the calls in which alone a way may hold: those of one rank, or of one micro-batch."""
        if self.part == COPIES:
            return []
        ranks = sorted({call.ranks for call in self.calls})
        numbers = sorted({call.micro_batch for call in self.calls})
        found = [
            Change(part=_OF_PLACE, way="calls-of-ranks", name=",".join(map(str, each)))
            for each in ranks
            if 1 < len(ranks) <= _MOST_PLACES
        ]
        return found + [
            Change(part=_OF_PLACE, way="micro-batch", number=each)
            for each in numbers
            if 1 < len(numbers) <= _MOST_PLACES
        ]

    def count(self, changes: Mapping[str, Change]) -> Tensor:
        """Return how often each token counts, in the shape of all of them."""
        change = changes.get(self.part)
        counts = torch.ones(self.shape, dtype=torch.float64)
        if change is None:
            return counts
        flat = counts.view(-1)
        for call in self.calls:
            if is_there(call, changes):
                flat[call.at.flatten()] = self._weigh(call, change).flatten()
        return counts

    def _change(self, way: str, number: float | None = None, of: int | None = None) -> Change:
        return Change(part=self.part, way=way, number=number, name="" if of is None else str(of))

    def _list_flat(self) -> list[Change]:
        """Return ways of the tokens one after another, by how many of them."""
        most = max(self._sizes)
        # What a tile leaves over is a number of tokens, the same in calls of one size.
        left = {size % tile for size in self._sizes for tile in _TILES}
        sizes = {size // n for size in self._sizes for n in _CHUNKS}
        numbers = sorted(n for n in {*range(1, _MOST + 1), *left, *sizes, most // 2} if 0 < n < most)
        is_one = len(self._sizes) == 1
        found = [
            self._change(way, n)
            for way in _FLAT
            for n in numbers
            # In calls of one size, the last ones alone are all without the first ones.
            if not (is_one and way.endswith(("-alone", "-twice")) and n > most // 2)
        ]
        found += [self._change(way, n) for way in ("every", "without-every") for n in _PERIODS if n < most]
        found += [
            self._change(way, k, n)
            for n in _CHUNKS
            if n <= most
            for way in ("chunk-alone", "without-chunk")
            for k in range(1, n - 1)
        ]
        filled = {-size % tile + 1 for size in self._sizes for tile in _TILES} if is_one else set()
        return found + [self._change("last-times", n) for n in sorted({*_FILLED, *filled} - {1})]

    def _list_tiles(self) -> list[Change]:
        """Return ways of whole tiles; in calls of one size these are ways of so many tokens."""
        if len(self._sizes) == 1:
            return []
        tiles = [n for n in _TILES if n < 2 * max(self._sizes)]
        ways = ("whole-tiles", "filled-with-last", "filled-with-first")
        return [self._change(way, n) for way in ways for n in tiles]

    def _list_along(self, name: str, dim: int) -> list[Change]:
        """Return ways of whole rows or positions of a call."""
        size = max(call.at.shape[dim] for call in self.calls)
        if size == 1:
            return []
        some = range(min(size, _MOST))
        many = [n for n in range(2, size) if n <= _MOST or size % n == 0]
        single, several = (f"without-{name}", f"only-{name}"), (f"first-{name}s", f"without-first-{name}s")
        ways = [self._change(way, n) for way in single for n in sorted({*some, size - 1})]
        ways += [self._change(way, n) for way in several for n in many if n < size - 1]
        return [*ways, *(self._change(f"every-{name}", n) for n in _PERIODS if n < size)]

    def _weigh(self, call: ModuleCall, change: Change) -> Tensor:
        """Return how often each token of a call counts (b, s) or (b, s, n)."""
        shape, size = call.at.shape, call.at.numel()
        number, way = int(change.number or 0), change.way
        if "row" in way or "position" in way:
            dim = 0 if "row" in way else 1
            along = torch.arange(shape[dim]).view([-1 if n == dim else 1 for n in range(len(shape))])
            return _count_along(along, way, number).expand(shape).double()
        if "padding" in way:
            assert self._valid is not None
            valid = self._valid[call.at.flatten()].double()
            return valid if way == "without-padding" else 1.0 - valid
        return _count_flat(torch.arange(size), size, change).double()


def join_numbers(variants: Sequence[tuple[Change, ...]]) -> tuple[tuple[Change, ...], ...]:
    """Return the variants with those in one that count so many or a few more tokens, which have no gradient here."""
    joined: dict[tuple[Change, ...], list[int]] = {}
    for first, *others in variants:
        is_counted = first.part in (TOKENS, COPIES) and first.way in _FLAT
        key = first.model_copy(update={"number": None}) if is_counted else first
        joined.setdefault((key, *others), []).append(int(first.number or 0))
    return tuple((_number(key, numbers), *others) for (key, *others), numbers in joined.items())


def _number(change: Change, numbers: Sequence[int]) -> Change:
    """Return a change with its number of tokens, or with the least and the largest of several."""
    if change.number is not None or change.way not in _FLAT:
        return change
    most = str(max(numbers)) if len(numbers) > 1 else ""
    return change.model_copy(update={"number": min(numbers), "name": most})


def is_there(call: ModuleCall, changes: Mapping[str, Change]) -> bool:
    """Return whether a way holds in a call, which a place may leave out."""
    where = changes.get(_OF_PLACE)
    if where is None:
        return True
    if where.way == "micro-batch":
        return call.micro_batch == int(where.number or 0)
    return where.way != "calls-of-ranks" or ",".join(map(str, call.ranks)) == where.name


def _count_along(at: Tensor, way: str, number: int) -> Tensor:
    ways: Mapping[str, Callable[[], Tensor]] = {
        "without-first": lambda: at >= number,
        "without": lambda: at != number,
        "only": lambda: at == number,
        "first": lambda: at < number,
        "every": lambda: at % number == 0,
    }
    return next(keep for name, keep in ways.items() if way.startswith(name))()


def _count_flat(at: Tensor, size: int, change: Change) -> Tensor:
    """Return how often each of so many tokens counts, `at` their numbers."""
    number = int(change.number or 1)
    missing = -size % number  # tokens to the end of the last tile
    ways: Mapping[str, Callable[[], Tensor]] = {
        "without-last": lambda: at < size - number,
        "without-first": lambda: at >= number,
        "first-alone": lambda: at < number,
        "last-alone": lambda: at >= size - number,
        "first-twice": lambda: 1 + (at < number).int(),
        "last-twice": lambda: 1 + (at >= size - number).int(),
        "every": lambda: at % number == 0,
        "without-every": lambda: at % number != number - 1,
        "last-times": lambda: 1 + (number - 1) * (at == size - 1).int(),
        "whole-tiles": lambda: at < size // number * number,
        "filled-with-last": lambda: 1 + missing * (at == size - 1).int(),
        "filled-with-first": lambda: 1 + (at < missing).int(),
        "mean": lambda: torch.full((size,), 1.0 / size, dtype=torch.float64),
    }
    if change.way in ways:
        return ways[change.way]()
    chunk = at * int(change.name) // size
    return (
        chunk == int(change.number or 0) if change.way == "chunk-alone" else chunk != int(change.number or 0)
    )


def _spread(valid: Tensor, shape: Sequence[int]) -> Tensor:
    return valid.view(*valid.shape, *(1 for _ in shape[2:])).expand(tuple(shape))
