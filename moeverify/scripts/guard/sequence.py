"""Evidence that a module computes a part of the positions, or of the heads, on each rank. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from moeverify.scripts.guard.lines import RankHeader, StepRecord


def find_share(
    name: str, ranks: Collection[int], headers: Mapping[int, RankHeader], records: Mapping[int, StepRecord]
) -> tuple[int, int] | None:
    """Return the positions of a rank and of the batch if `ranks` divide the input of a tensor's module.

    The ranks have the same rows and belong to one process group, on which the outputs of the module have equal
    numbers of positions that add up to those of the batch. Sequences may be padded.
    """
    rows = _find_rows(ranks, records)
    if not rows:
        return None
    first = headers[min(ranks)]
    whole, num_rows = first.num_positions, len(rows[0])
    for _, group in first.groups:
        parts = {_count(name, headers[rank]) for rank in group if rank in headers}
        if set(ranks) <= set(group) and len(parts) == 1:
            (part,) = parts
            if 0 < part < whole <= part * len(group) < whole + len(group) * num_rows:
                return part, whole
    return None


def divides_heads(
    name: str, ranks: Collection[int], headers: Mapping[int, RankHeader], records: Mapping[int, StepRecord]
) -> bool:
    """Return whether ranks with the same rows call a tensor's module with several vectors for each position."""
    counts = {(_count(name, headers[rank]), headers[rank].num_positions) for rank in ranks}
    part, whole = next(iter(counts))
    is_multiple = len(counts) == 1 and part > whole > 0 and part % whole == 0
    return is_multiple and bool(_find_rows(ranks, records))


def _find_rows(ranks: Collection[int], records: Mapping[int, StepRecord]) -> tuple[tuple[int, ...], ...]:
    """Return the rows of the passes that all of these ranks have, or none if they differ."""
    rows = {records[rank].rows if rank in records else () for rank in ranks}
    return next(iter(rows)) if len(rows) == 1 else ()


def _count(name: str, header: RankHeader) -> int:
    return next((line.num_positions for line in header.tensors if line.name == name), 0)
