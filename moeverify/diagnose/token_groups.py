"""Groups of the tokens of a batch by which a loss may be averaged, and what may be counted of each.

Letters: B rows and S positions of the batch. All tensors are (B, S).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from moeverify.layout.region import Indices
from moeverify.results.token_weights import CountOf, GroupUnit, TokenCount, TokenGroups

BASIC: tuple[GroupUnit, ...] = (
    "batch",
    "rank",
    "micro-batch",
    "same-micro-batch",
    "row",
    "row-of-rank",
    "position",
)
CHUNKS: tuple[GroupUnit, ...] = ("chunk", "chunk-of-row", "chunk-of-positions", "chunk-by-position")

_COUNTS: tuple[CountOf, ...] = ("valid", "all", "rows", "valid-less-rows", "all-less-rows", "root-of-valid")
_NUMBERED: tuple[GroupUnit, ...] = ("rank", "micro-batch", "same-micro-batch", "row")
_MOST_SIZES = 64
"""So many sizes of chunks that weights allow are tried, the largest first: smaller ones are parts of these."""


@dataclass(frozen=True)
class Fields:
    """Where each token is: the number of its rank and of its micro-batch, there its row and position, and how many
    rows and positions there are.
    """

    rank: Tensor
    micro_batch: Tensor
    row: Tensor
    position: Tensor
    num_rows: Tensor
    num_positions: Tensor

    @classmethod
    def of(
        cls, shape: tuple[int, int], micro_batches: Mapping[int, Sequence[tuple[Indices, Indices]]]
    ) -> Fields | None:
        """Return where tokens are; None where ranks do not have each once, but for replicas of all of one."""
        fields = [torch.full(shape, -1) for _ in range(6)]
        seen = list(
            dict.fromkeys(tuple((tuple(r), tuple(p)) for r, p in each) for each in micro_batches.values())
        )
        for rank, shares in enumerate(seen):
            for number, (rows, positions) in enumerate(shares):
                at = torch.tensor(rows).unsqueeze(1), torch.tensor(positions)
                if not rows or not positions or bool((fields[0][at] >= 0).any()):
                    return None
                values = [
                    torch.tensor(rank),
                    torch.tensor(number),
                    torch.arange(len(rows)).unsqueeze(1),
                    torch.arange(len(positions)).unsqueeze(0),
                    torch.tensor(len(rows)),
                    torch.tensor(len(positions)),
                ]
                for field, value in zip(fields, values, strict=True):
                    field[at] = value
        return cls(*fields) if seen and bool((fields[0] >= 0).all()) else None


@dataclass(frozen=True)
class Groups:
    """The tokens of a batch in groups: the number of each token's group, from 0 on, and inside which it has it.

    `numbers` are those in the micro-batch, or the batch, that groups are counted in.
    """

    name: TokenGroups
    ids: Tensor
    numbers: Tensor

    def add_up(self, values: Tensor) -> Tensor:
        """Return of each token the sum over its group."""
        flat, size = self.ids.flatten(), int(self.ids.max()) + 1
        sums = torch.zeros(size, dtype=torch.float64).index_add(0, flat, values.flatten().to(torch.float64))
        return sums[flat].view(self.ids.shape)

    def each(self, values: Tensor) -> Tensor:
        """Return the value of each group (number of groups), of values that all tokens of a group have."""
        found = torch.zeros(int(self.ids.max()) + 1, dtype=torch.float64)
        found[self.ids.flatten()] = values.flatten().to(torch.float64)
        return found

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum over each group (number of groups)."""
        size = int(self.ids.max()) + 1
        return torch.zeros(size, dtype=torch.float64).index_add(
            0, self.ids.flatten(), values.flatten().to(torch.float64)
        )


class TokenMap:
    """All groups of the tokens of a batch, of which those that are `counted` have a loss."""

    def __init__(self, fields: Fields, counted: Tensor) -> None:
        self.fields, self.counted = fields, counted
        self.lengths = fields.num_rows * fields.num_positions
        self._begin = fields.rank * (int(fields.micro_batch.max()) + 1) + fields.micro_batch

    @cached_property
    def basic(self) -> list[Groups]:
        """Return the groups that are no chunks, without those that are the same as others before."""
        rows, columns = self.counted.shape
        at = self.fields
        zero = torch.zeros_like(at.rank)
        found = {
            "batch": (zero, zero),
            "rank": (at.rank, at.rank),
            "micro-batch": (self._begin, at.micro_batch),
            "same-micro-batch": (at.micro_batch, at.micro_batch),
            "row": (torch.arange(rows).unsqueeze(1).expand(rows, columns),) * 2,
            "row-of-rank": (self._begin * rows + at.row, at.row),
            "position": (torch.arange(columns).expand(rows, columns),) * 2,
        }
        groups: list[Groups] = []
        for unit in BASIC:
            ids, numbers = found[unit]
            each = _make(TokenGroups(unit=unit), ids, numbers)
            if not any(torch.equal(each.ids, other.ids) for other in groups):
                groups.append(each)
        return groups

    def chunk(self, unit: GroupUnit, size: int) -> Groups:
        """Return the chunks of a size in each micro-batch."""
        at, order = self.fields, self.order(unit)
        numbers = order // size
        if unit == "chunk-of-row":
            ids = (self._begin * self.counted.shape[0] + at.row) * self.lengths.max() + numbers
        else:
            ids = self._begin * self.lengths.max() + numbers
        return _make(TokenGroups(unit=unit, size=size), ids, numbers)

    def order(self, unit: GroupUnit) -> Tensor:
        """Return the number of each token in the order in which its micro-batch, or its row, is cut into chunks."""
        at = self.fields
        if unit == "chunk":
            return at.row * at.num_positions + at.position
        if unit == "chunk-by-position":
            return at.position * at.num_rows + at.row
        return at.position

    def length(self, unit: GroupUnit) -> Tensor:
        """Return how many of these numbers there are."""
        return self.lengths if unit in ("chunk", "chunk-by-position") else self.fields.num_positions

    def list_sizes(self, unit: GroupUnit, alike: Tensor) -> list[int]:
        """Return the sizes of chunks inside of which all counted tokens are `alike` (numbers of classes)."""
        order = self.order(unit)
        largest = int(self.length(unit).max())
        sizes = torch.arange(1, largest)
        fits = torch.ones_like(sizes, dtype=torch.bool)
        line = (
            self._begin if unit != "chunk-of-row" else self._begin * self.counted.shape[0] + self.fields.row
        )
        key = (line * (largest + 1) + order)[self.counted]
        classes, by = alike[self.counted], key.argsort(stable=True)
        changes = {
            (before % (largest + 1), after % (largest + 1))
            for (before, one), (after, other) in pairwise(
                zip(key[by].tolist(), classes[by].tolist(), strict=True)
            )
            if one != other and before // (largest + 1) == after // (largest + 1)
        }
        for before, after in changes:
            fits &= before // sizes < after // sizes
        return sizes[fits].flip(0).tolist()[:_MOST_SIZES] if changes else []

    def list_counts(self, groups: Groups) -> Iterator[tuple[TokenCount, Tensor]]:
        """Yield what may be counted of each group, from simple to complex."""
        everything = torch.ones_like(self.counted)
        valid, total = groups.add_up(self.counted), groups.add_up(everything)
        in_row = self._count_rows(groups)
        values: Mapping[CountOf, Tensor] = {
            "valid": valid,
            "all": total,
            "rows": in_row,
            "valid-less-rows": valid - in_row,
            "all-less-rows": total - in_row,
            "root-of-valid": valid.sqrt(),
        }
        for of in _COUNTS:
            yield TokenCount(of=of, groups=groups.name), values[of]
        if groups.name.size:
            tokens = total.max() if groups.name.unit == "chunk-of-positions" else float(groups.name.size)
            yield TokenCount(of="size", groups=groups.name), torch.full_like(valid, float(tokens))
        if groups.name.unit in _NUMBERED:
            yield TokenCount(of="valid", groups=groups.name, whose="before"), self._count_before(groups)

    def count_groups(self, groups: Groups, inside: Groups) -> tuple[TokenCount, Tensor]:
        """Return how many groups with counted tokens there are inside of the group of each token."""
        pairs = torch.unique(torch.stack([inside.ids[self.counted], groups.ids[self.counted]], dim=1), dim=0)
        counts = torch.bincount(pairs[:, 0], minlength=int(inside.ids.max()) + 1).to(torch.float64)
        count = TokenCount(of="groups", groups=groups.name, inside=inside.name)
        return count, counts[inside.ids]

    def _count_rows(self, groups: Groups) -> Tensor:
        rows = torch.arange(self.counted.shape[0]).unsqueeze(1).expand(self.counted.shape)
        pairs = torch.unique(torch.stack([groups.ids.flatten(), rows.flatten()], dim=1), dim=0)
        counts = torch.bincount(pairs[:, 0], minlength=int(groups.ids.max()) + 1).to(torch.float64)
        return counts[groups.ids]

    def _count_before(self, groups: Groups) -> Tensor:
        """Return of each token the valid ones of the group before its own: of a micro-batch, of the same rank."""
        is_first = groups.numbers == 0 if groups.name.unit == "micro-batch" else groups.ids == 0
        before = groups.sums(self.counted)[(groups.ids - 1).clamp(min=0)]
        return torch.where(is_first, groups.add_up(self.counted), before)


def _make(name: TokenGroups, ids: Tensor, numbers: Tensor) -> Groups:
    _, numbered = torch.unique(ids, return_inverse=True)
    return Groups(name, numbered.view(ids.shape), numbers)
