"""How the ranks of a context group divide the positions of a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from moeverify.axes.split import Positions, split_in_zigzag


class Chunks:
    """How the ranks of a context group divide a row: `positions` of each, in its order, by the group's rank.

    Of the key at each position (S): `owner` is the rank that has it, `place` the number that it has there, `arrival`
    the number that it has where all ranks' keys stand one after another, and `run` the number of the stretch of
    neighbouring positions that it is in. `order` has the positions in the order of arrival.
    """

    def __init__(self, positions: Sequence[Sequence[int]]) -> None:
        self.positions = positions
        self.order = torch.tensor([position for part in positions for position in part])
        owners = torch.tensor([rank for rank, part in enumerate(positions) for _ in part])
        places = torch.tensor([place for part in positions for place in range(len(part))])

        def by_position(values: Tensor) -> Tensor:
            return torch.empty_like(values).scatter(0, self.order, values)

        self.owner, self.place = by_position(owners), by_position(places)
        self.arrival = by_position(torch.arange(len(self.order)))
        breaks = (self.arrival.diff() != 1) | (self.owner.diff() != 0)
        self.run = torch.cat([torch.zeros(1, dtype=torch.int64), breaks.cumsum(0)])
        self.splits = self._split_otherwise()

    def _split_otherwise(self) -> Mapping[str, Tensor]:
        """Return by name, of splits that would be others, the position (S) that each key would have there.

        That of a split in runs is the order of arrival.
        """
        size, length = len(self.positions), len(self.order)
        found: dict[str, Tensor] = {}
        cuts: dict[str, Callable[[int, int, int], Positions]] = {
            "zigzag": split_in_zigzag,
            "in-turn": lambda length, size, rank: range(rank, length, size),
        }
        for name, cut in cuts.items():
            parts = [torch.tensor(tuple(cut(length, size, rank))) for rank in range(size)]
            own = [torch.tensor(tuple(part)) for part in self.positions]
            if length % (2 * size) or any(map(torch.equal, parts, own)):
                continue
            found[name] = torch.stack(parts)[self.owner, self.place]
        return found

    def shift(self, by: int) -> Tensor:
        """Return for the key of each position (S) that of the same place on the rank `by` ranks further."""
        size, length = len(self.positions), len(self.positions[0])
        return self.order[(self.owner + by) % size * length + self.place]
