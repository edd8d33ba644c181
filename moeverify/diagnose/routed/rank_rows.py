"""What came back for token copies, in the order in which a rank's experts have them: counts, and other places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.diagnose.routed.exchange import Call
from moeverify.diagnose.routed.returned_rows import LOST, ReturnedRows
from moeverify.results.layout import TakenCounts


@dataclass(frozen=True)
class RankRows:
    """The rows (M) of one rank of one exchange, sorted by expert: the right experts of the rank, and those found.

    `own` are the tokens of the rows, `tokens` those whose rows came back; `experts` of what is lost are `LOST`.
    """

    call: int
    rank: int
    right: Tensor
    experts: Tensor
    own: Tensor
    tokens: Tensor
    per_rank: int

    @property
    def counts(self) -> list[int]:
        """Return the right counts of rows."""
        return torch.bincount(self.right, minlength=self.per_rank).tolist()

    @property
    def is_wrong(self) -> bool:
        """Return whether any row is another one."""
        return not (torch.equal(self.own, self.tokens) and torch.equal(self.right, self.experts))

    def list_taken(self) -> list[int] | None:
        """Return the counts by which experts have taken the rows; None where no counts give that."""
        kept = self.experts[self.experts != LOST]
        is_cut = bool((self.experts[: len(kept)] != LOST).all())
        if not is_cut or bool((kept.diff() < 0).any()) or bool(((kept < 0) | (kept >= self.per_rank)).any()):
            return None
        if not torch.equal(self.own[: len(kept)], self.tokens[: len(kept)]):
            return None
        return torch.bincount(kept, minlength=self.per_rank).tolist()


def list_rank_rows(
    calls: Sequence[Call], ids: Tensor, num_experts: int, found: ReturnedRows
) -> Iterator[RankRows]:
    """Yield the rows of every rank of every exchange; `ids` (N, k) are the right choices."""
    choices = ids.shape[1]
    for number, call in enumerate(calls):
        tokens = torch.cat(call)
        copies = (tokens.unsqueeze(1) * choices + torch.arange(choices)).flatten()
        source = torch.cat([torch.full((len(each) * choices,), rank) for rank, each in enumerate(call)])
        expert, per_rank = ids.flatten()[copies], num_experts // len(call)
        order = (expert * len(call) + source).argsort(stable=True)
        for rank in range(len(call)):
            own = copies[order[expert[order] // per_rank == rank]]
            taken = found.experts.flatten()[own]
            yield RankRows(
                number,
                rank,
                ids.flatten()[own] - rank * per_rank,
                torch.where(taken == LOST, taken, taken - rank * per_rank),
                own // choices,
                found.tokens.flatten()[own],
                per_rank,
            )


def find_counts(rows: Sequence[RankRows]) -> TakenCounts | None:
    """Return by which counts of rows experts take them where those are wrong, if counts are all that is."""
    wrong = [each for each in rows if each.is_wrong]
    taken = [each.list_taken() for each in wrong]
    if not wrong or any(each is None for each in taken):
        return None
    known = [each for each in taken if each is not None]
    first = next(i for i, (a, b) in enumerate(zip(known[0], wrong[0].counts, strict=True)) if a != b)
    calls = {
        tuple(
            other.call
            for other in rows
            if other.rank == each.rank
            and other.call != each.call
            and _cut(other.counts, len(each.right)) == counts
        )
        for each, counts in zip(wrong, known, strict=True)
    }
    same = set.intersection(*map(set, calls)) if calls else set()
    return TakenCounts(
        rank=wrong[0].rank,
        expert=first,
        end=sum(known[0][: first + 1]),
        right_end=sum(wrong[0].counts[: first + 1]),
        order=_find_order([(each, right.counts) for each, right in zip(known, wrong, strict=True)]),
        micro_batch=min(same) if same else None,
    )


def _cut(counts: Sequence[int], most: int) -> list[int]:
    """Return counts of which the last ones end with so many rows."""
    found: list[int] = []
    for count in counts:
        found.append(min(count, most - sum(found)))
    return found


def _find_order(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[int, ...]:
    """Return whose count each expert has, of counts that are taken and right ones; none where no order fits all."""
    size = len(pairs[0][0])
    possible = [
        {source for source in range(size) if all(taken[at] == right[source] for taken, right in pairs)}
        for at in range(size)
    ]
    order = tuple(min(sources, default=-1) for sources in possible)
    return order if len(set(order) - {-1}) == size else ()


def find_row_offset(rows: Sequence[RankRows]) -> int | None:
    """Return how many places before its own each wrong row stands, on its rank, if all by the same number."""
    offsets: set[int] | None = None
    for each in rows:
        places: dict[int, list[int]] = {}
        for place, token in enumerate(each.own.tolist()):
            places.setdefault(token, []).append(place)
        for place in (each.own != each.tokens).nonzero().flatten().tolist():
            found = {(place - other) % len(each.own) for other in places.get(int(each.tokens[place]), [])}
            offsets = found if offsets is None else offsets & found
            if not offsets:
                return None
    return min(offsets) if offsets else None
