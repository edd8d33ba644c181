"""Where the values of wrong tokens come from, one by one: from other tokens, from none, or from several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moeverify.diagnose.wrong_tensor import RankShard, WrongTensor
from moeverify.results.layout import RankSource, Run

TokenWay = Literal["moved", "zero", "twice", "added"]

_NEAR = 3  # rows beside the nearest projection that are looked at
_LEAST_WIDTH = 4  # numbers of a token: fewer are equal by chance


@dataclass(frozen=True)
class SeenTokens:
    """What one rank has of a micro-batch: which of its tokens (b, s) are wrong, and flat tokens of the batch (b, s).

    `sources` (b, s) are the flat tokens whose values stand there, or are added; -1 where there is none.
    """

    shard: RankShard
    wrong: Tensor
    tokens: Tensor
    sources: Tensor


class TokenIndex:
    """The golden's tokens (N, D), found by their values: by a projection first, then as they are."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        generator = torch.Generator().manual_seed(0)
        self._direction = torch.randn(rows.shape[1], dtype=rows.dtype, generator=generator)
        self._sorted, self._order = (rows @ self._direction).sort()

    def find(self, found: Tensor, allowed: float) -> Tensor:
        """Return the row that each of `found` (M, D) equals, -1 where it equals none."""
        at = torch.searchsorted(self._sorted, (found @ self._direction).contiguous())
        best = torch.full((len(found),), -1)
        least = torch.full((len(found),), float("inf"), dtype=found.dtype)
        for step in range(-_NEAR, _NEAR + 1):
            row = self._order[(at + step).clamp(0, len(self.rows) - 1)]
            distance = (found - self.rows[row]).abs().amax(dim=1)
            is_nearer = distance < least
            best, least = torch.where(is_nearer, row, best), torch.where(is_nearer, distance, least)
        return torch.where(least <= allowed, best, -1)


def find_sources(tensor: WrongTensor) -> tuple[TokenWay, list[SeenTokens]] | None:
    """Return what all wrong tokens (batch, sequence, ...) have in common; None where they do not have one thing."""
    width = tensor.expected.shape[2:].numel()
    if width < _LEAST_WIDTH or not tensor.expected.numel():
        return None
    if any(shard.local is None or not shard.region.dims for shard in tensor.shards):
        return None
    if any(shard.region.local_shape[2:] != tensor.expected.shape[2:] for shard in tensor.shards):
        return None
    rows = tensor.expected.reshape(-1, width)
    allowed = tensor.exact * float(rows.abs().max())
    index = TokenIndex(rows)
    shards = [shard for shard in tensor.shards if shard.region.numel]
    for way in ("zero", "twice", "moved", "added"):
        seen = [_look(tensor, shard, way, index, allowed) for shard in shards]
        known = [each for each in seen if each is not None]
        if len(known) == len(seen) and any(bool(each.wrong.any()) for each in known):
            return way, known
    return None


def _look(
    tensor: WrongTensor, shard: RankShard, way: TokenWay, index: TokenIndex, allowed: float
) -> SeenTokens | None:
    """Return what a rank's tokens are if its wrong ones are so; None where they are not."""
    width = index.rows.shape[1]
    expected, actual = (each.reshape(-1, width) for each in (tensor.expected_of(shard), shard.values()))
    wrong = ~((actual - expected).abs().amax(dim=1) <= allowed)
    found, right = actual[wrong], expected[wrong]
    sources = torch.full((len(actual),), -1)
    if way == "zero" and bool((found != 0.0).any()):
        return None
    if way == "twice" and not bool(((found - 2.0 * right).abs() <= 2.0 * allowed).all()):
        return None
    if way in ("moved", "added"):
        values = found if way == "moved" else found - right
        is_some = values.abs().amax(dim=1) > allowed if len(values) else torch.zeros(0, dtype=torch.bool)
        places = index.find(values, allowed) if len(values) else torch.zeros(0, dtype=torch.int64)
        if not bool((places >= 0).all()) or not bool(is_some.all()):
            return None
        sources[wrong] = places
    shape, length = shard.region.local_shape[:2], tensor.expected.shape[1]
    rows, positions = (torch.tensor(tuple(each)) for each in shard.region.dims[:2])
    tokens = rows.unsqueeze(1) * length + positions
    return SeenTokens(shard, wrong.view(shape), tokens, sources.view(shape))


def list_runs(seen: Sequence[SeenTokens], length: int) -> list[Run]:
    """Return the wrong tokens as runs along the sequence, whose sources are a run too, the longest first."""
    pairs = {
        int(token): int(source)
        for each in seen
        for token, source in zip(each.tokens[each.wrong], each.sources[each.wrong], strict=True)
    }
    runs: list[Run] = []
    for token in sorted(pairs):
        row, position = divmod(token, length)
        source = divmod(pairs[token], length)
        last = runs[-1] if runs else None
        if last is not None and (last.row, last.stop) == (row, position):
            step = source[1] - last.source[1] - (last.stop - last.start - 1) * last.step
            is_second = last.stop - last.start == 1
            step = source[1] - last.source[1] if is_second else step
            if source[0] == last.source[0] and abs(step) <= 1 and (is_second or step == last.step):
                runs[-1] = last.model_copy(update={"stop": position + 1, "step": step})
                continue
        runs.append(Run(row=row, start=position, stop=position + 1, source=source))
    return sorted(runs, key=lambda run: (run.start - run.stop, run.row, run.start))


def find_offset(seen: Sequence[SeenTokens], rows: Tensor) -> tuple[int, int] | None:
    """Return by how many rows and positions of its part a rank has the sources further on, around the end.

    None where that is not so of all. A token may have a twin among `rows` (N, D), which is as good a source.
    """
    counts: Counter[tuple[int, int]] = Counter()
    for each in seen:
        size = each.tokens.shape
        places = {token: at for at, token in enumerate(each.tokens.flatten().tolist())}
        for at in each.wrong.flatten().nonzero().flatten().tolist():
            source = places.get(int(each.sources.flatten()[at]))
            if source is not None:
                down, along = source // size[1] - at // size[1], source % size[1] - at % size[1]
                counts[down % size[0], along % size[1]] += 1
    if not counts:
        return None
    ((down, along), _) = counts.most_common(1)[0]
    for each in seen:
        shifted = each.tokens.roll((-down, -along), (0, 1))
        if not torch.equal(rows[shifted[each.wrong]], rows[each.sources[each.wrong]]):
            return None
    size = seen[0].tokens.shape
    return down - size[0] * (2 * down > size[0]), along - size[1] * (2 * along > size[1])


def find_rank_sources(seen: Sequence[SeenTokens]) -> tuple[RankSource, ...]:
    """Return of which rank each has what belongs there at the same places; none where that is not so of all."""
    found: dict[int, set[int]] = {}
    for each in seen:
        if not bool(each.wrong.any()):
            continue
        alike = {
            other.shard.rank
            for other in seen
            if other.shard.rank != each.shard.rank
            and other.tokens.shape == each.tokens.shape
            and torch.equal(other.tokens[each.wrong], each.sources[each.wrong])
        }
        rank = each.shard.rank
        found[rank] = found[rank] & alike if rank in found else alike
    if not found or not all(found.values()):
        return ()
    return tuple(RankSource(rank=rank, source=min(others)) for rank, others in sorted(found.items()))
