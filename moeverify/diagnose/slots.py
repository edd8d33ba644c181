"""Where the values of a tensor stand in all parameters, flattened one behind the other: in runs, by their values.

A rank that fills a flat buffer, or cuts it, otherwise than it should has right values in the slots of others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from moeverify.diagnose.families import name_family
from moeverify.results.slots import FlatOrder, Flattening, Piece

_PROBES, _WINDOW = 8, 64
_MOST_SOURCES = 32  # places where one value stands: what stands at more is no sign
_MOST_RUNS = 16
_LEAST_RUN = 8  # elements to a run, on the average
_ORDERS: tuple[FlatOrder, ...] = ("registered", "reversed", "by-name", "smallest-first", "largest-first")
_FILLED = tuple(2**power for power in range(1, 11))


@dataclass(frozen=True)
class Run:
    """`count` values from `at` on are those of a flat buffer from `start` on; zeros where that is None."""

    at: int
    count: int
    start: int | None


class Flat:
    """What a rank has of some parameters, by name and in the order in which they are registered, flattened."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.names = tuple(values)
        self.sizes = {name: value.numel() for name, value in values.items()}
        self.starts: dict[str, int] = {}
        total = 0
        for name, size in self.sizes.items():
            self.starts[name] = total
            total += size
        self.values = torch.cat([value.reshape(-1).double() for value in values.values()])
        self._indices: dict[str, Tensor] = {}

    def of(self, name: str) -> Tensor:
        """Return the values of a parameter, flat."""
        return self.values[self.starts[name] : self.starts[name] + self.sizes[name]]

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        found = self.values.sort()
        return found.values, found.indices

    def find(self, value: float, allowed: float) -> Tensor:
        """Return the places of a value."""
        values, places = self._sorted
        first, last = (int(torch.searchsorted(values, value + sign * allowed)) for sign in (-1.0, 1.0))
        return places[first:last]

    def has(self, target: Tensor, allowed: float) -> bool:
        """Return whether the largest values of a target are among these, and not all of them are one."""
        large = target[target.abs().topk(min(_PROBES, len(target))).indices]
        return all(len(self.find(value, allowed)) for value in large.tolist())

    def locate(self, target: Tensor, allowed: float) -> list[Run]:
        """Return the runs that a target is made of, nothing where it is made of many or of other values."""
        runs: list[Run] = []
        at = 0
        while at < len(target):
            run = self._find_run(target, at, allowed)
            if run is None or len(runs) == _MOST_RUNS:
                return []
            runs.append(run)
            at += run.count
        found = [run for run in runs if run.start is not None]
        count = sum(run.count for run in found)
        return runs if found and count >= _LEAST_RUN * len(found) else []

    def _find_run(self, target: Tensor, at: int, allowed: float) -> Run | None:
        """Return the longest run that begins at a place."""
        size = min(_WINDOW, len(target) - at)
        while size:
            window = target[at : at + size].abs()
            if float(window.max()) <= allowed:
                large = (target[at:].abs() > allowed).nonzero().flatten()
                return Run(at, int(large[0]) if len(large) else len(target) - at, None)
            probe = int(window.argmax())
            places = self.find(float(target[at + probe]), allowed) - probe
            places = places[(places >= 0)][:_MOST_SOURCES]
            found = [
                Run(at, count, int(start))
                for start in places
                if (count := self._extend(target, at, int(start), allowed)) > probe
            ]
            if found:
                return max(found, key=lambda run: run.count)
            size = probe  # what begins here ends before it
        return None

    def _extend(self, target: Tensor, at: int, start: int, allowed: float) -> int:
        """Return how many values from a place on are those of the buffer from another one on."""
        count = min(len(target) - at, len(self.values) - start)
        wrong = ((target[at : at + count] - self.values[start : start + count]).abs() > allowed).nonzero()
        return int(wrong[0]) if len(wrong) else count

    def cut(self, runs: Sequence[Run]) -> list[Piece]:
        """Return the runs parameter by parameter."""
        pieces: list[Piece] = []
        starts = list(self.starts.values())
        for run in runs:
            if run.start is None:
                pieces.append(Piece(at=run.at, count=run.count))
                continue
            at, start, left = run.at, run.start, run.count
            while left:
                name = self.names[bisect_right(starts, start) - 1]
                inside = start - self.starts[name]
                count = min(left, self.sizes[name] - inside)
                pieces.append(Piece(at=at, count=count, tensor=name, start=inside))
                at, start, left = at + count, start + count, left - count
        return pieces

    def take(self, flattening: Flattening, name: str) -> Tensor | None:
        """Return what stands in the slot of a parameter under another order; None where it is not in the buffer."""
        members = self._select(flattening)
        if name not in members:
            return None
        key = flattening.model_dump_json()
        if key not in self._indices:
            self._indices[key] = self._index(flattening, members)
        index = self._indices[key][self.starts[name] : self.starts[name] + self.sizes[name]]
        return torch.where(index < 0, 0.0, self.values[index.clamp(min=0)])

    def take_at(self, name: str, offset: int, *, wraps: bool) -> Tensor:
        """Return what stands so many elements behind the slot of a parameter: around the end, or zeros there."""
        places = torch.arange(self.sizes[name]) + self.starts[name] + offset
        is_outside = (places < 0) | (places >= len(self.values))
        found = self.values[places % len(self.values)]
        return found if wraps else torch.where(is_outside, 0.0, found)

    def _select(self, flattening: Flattening) -> tuple[str, ...]:
        if not flattening.family:
            return self.names
        wanted = not flattening.is_outside
        return tuple(name for name in self.names if (name_family([name]) == flattening.family) is wanted)

    def _index(self, flattening: Flattening, members: Sequence[str]) -> Tensor:
        """Return for each element of all parameters where in them what it has stands; -1 where that is nothing."""
        buffer = torch.cat(
            [
                torch.cat(
                    [
                        torch.arange(self.sizes[name]) + self.starts[name],
                        filling.new_full((len(filling),), -1),
                    ]
                )
                for name in self._sort(members, flattening.written)
                for filling in [torch.empty(-self.sizes[name] % flattening.filled_written, dtype=torch.int64)]
            ]
        )
        found = torch.full((len(self.values),), -1)
        at = 0
        for name in self._sort(members, flattening.read):
            values = buffer[at : at + self.sizes[name]]
            found[self.starts[name] : self.starts[name] + len(values)] = values
            at += self.sizes[name] + -self.sizes[name] % flattening.filled_read
        return found

    def _sort(self, members: Sequence[str], order: FlatOrder) -> list[str]:
        if order == "registered":
            return list(members)
        if order == "reversed":
            return list(reversed(members))
        if order == "by-name":
            return sorted(members)
        sign = -1 if order == "largest-first" else 1
        return sorted(members, key=lambda name: sign * self.sizes[name])

    def list_flattenings(self) -> Iterator[Flattening]:
        """Yield the ways in which a buffer may be written and read: all parameters, and experts' apart."""
        families: list[tuple[str, bool]] = [("", False)]
        if len({name_family([name]) == "expert" for name in self.names}) > 1:
            families += [("expert", True), ("expert", False)]
        for family, is_outside in families:
            pairs = [pair for pair in product(_ORDERS, repeat=2) if pair[0] != pair[1]]
            for written, read in pairs:
                if "registered" in (written, read) or "reversed" in (written, read):
                    yield Flattening(written=written, read=read, family=family, is_outside=is_outside)
            for order, filled in product(_ORDERS[:2], _FILLED):
                if any(size % filled for size in self.sizes.values()):
                    way = Flattening(written=order, read=order, family=family, is_outside=is_outside)
                    yield way.model_copy(update={"filled_written": filled})
                    yield way.model_copy(update={"filled_read": filled})
