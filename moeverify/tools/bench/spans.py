"""Sets of time spans as sorted, disjoint (start, end) pairs. Units: microseconds, as in the trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[float, float]


def merge(spans: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """Return the union of spans. Spans that are at most `gap` apart are merged."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Return the total duration of the union of spans."""
    return sum(end - start for start, end in merge(spans))


def overlap(left: Sequence[Span], right: Sequence[Span]) -> float:
    """Return the duration of the intersection of two lists of disjoint, sorted spans."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total
