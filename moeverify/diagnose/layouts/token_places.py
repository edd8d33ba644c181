"""Which tokens are wrong, as short as it can be said: the last ones of every rank, one row, one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.diagnose.layouts.token_sources import SeenTokens
from moeverify.results.layout import Span, TokenPlaces

_MOST_SPANS = 2


def find_places(seen: Sequence[SeenTokens], length: int) -> TokenPlaces | None:
    """Return which tokens are wrong; None where nothing short says it. `length` is that of the sequence."""
    numbers: dict[int, int] = {}
    calls: list[tuple[int, int, SeenTokens]] = []
    for each in seen:
        rank = each.shard.rank
        calls.append((rank, numbers.get(rank, 0), each))
        numbers[rank] = numbers.get(rank, 0) + 1
    wrong = [call for call in calls if bool(call[2].wrong.any())]
    ranks = sorted({rank for rank, _, _ in wrong})
    micro_batches = sorted({number for _, number, _ in wrong})
    if len(wrong) != sum(1 for rank, number, _ in calls if rank in ranks and number in micro_batches):
        return None
    found = _find_local([each for _, _, each in wrong]) or _find_in_batch(
        [each for _, _, each in wrong], length
    )
    if found is None:
        return None
    restricted = {
        "ranks": tuple(ranks) if len(ranks) < len(numbers) else (),
        "micro_batches": tuple(micro_batches) if len(micro_batches) < max(numbers.values()) else (),
    }
    return found.model_copy(update=restricted)


def _find_local(seen: Sequence[SeenTokens]) -> TokenPlaces | None:
    """Return the places in what a rank has, where they are the same on all."""
    first = seen[0].wrong
    if any(each.wrong.shape != first.shape or not torch.equal(each.wrong, first) for each in seen):
        return None
    size = (int(first.shape[0]), int(first.shape[1]))
    if bool(first.all()):
        return TokenPlaces(size=size)
    rows, positions = first.any(dim=1), first.any(dim=0)
    if torch.equal(rows.unsqueeze(1) & positions, first):
        spans = _list_spans(rows), _list_spans(positions)
        if max(map(len, spans)) <= _MOST_SPANS:
            return TokenPlaces(rows=spans[0], positions=spans[1], size=size)
    flat = _list_spans(first.flatten())
    return TokenPlaces(flat=flat, size=size) if len(flat) <= _MOST_SPANS else None


def _find_in_batch(seen: Sequence[SeenTokens], length: int) -> TokenPlaces | None:
    """Return rows and positions of the batch, where the wrong tokens are those at both."""
    tokens = torch.cat([each.tokens[each.wrong] for each in seen])
    rows, positions = tokens // length, tokens % length
    size = (int(rows.max()) + 1, length)
    is_row, is_position = torch.zeros(size[0], dtype=torch.bool), torch.zeros(length, dtype=torch.bool)
    is_row[rows], is_position[positions] = True, True
    for each in seen:
        inside = is_row[(each.tokens // length).clamp(max=size[0] - 1)] & (each.tokens // length < size[0])
        if not torch.equal(inside & is_position[each.tokens % length], each.wrong):
            return None
    spans = _list_spans(is_row), _list_spans(is_position)
    if max(map(len, spans)) > _MOST_SPANS:
        return None
    return TokenPlaces(rows=spans[0], positions=spans[1], size=size, in_batch=True)


def _list_spans(mask: Tensor) -> tuple[Span, ...]:
    """Return where a mask is true; none where it is so everywhere."""
    if bool(mask.all()):
        return ()
    at = mask.nonzero().flatten().tolist()
    spans: list[Span] = []
    for place in at:
        if spans and spans[-1].stop == place:
            spans[-1] = Span(start=spans[-1].start, stop=place + 1)
        else:
            spans.append(Span(start=place, stop=place + 1))
    return tuple(spans)
