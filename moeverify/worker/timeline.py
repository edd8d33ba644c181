"""The collectives of one step on one rank with their modules, and the timelines of all ranks joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from moeverify.axes.groups import name_ranks
from moeverify.case.schema import Case
from moeverify.results.observation import Direction
from moeverify.results.timeline import CollectiveKind, TimedCollective, Timeline
from moeverify.results.trace import CollectiveRecord

MOST_IN_ALL = 4000
"""Most collectives of all ranks together that a result keeps: about 150 kB of JSON."""

Spans = Mapping[tuple[str, str], Sequence[tuple[int, int]]]
"""By (direction, module): the numbers of the collectives before and at the end of each pass."""


@dataclass(frozen=True)
class RankTimeline:
    """One rank's collectives of a step, each with its kind; `num_issued` counts those that are not kept too."""

    collectives: Sequence[tuple[CollectiveKind, CollectiveRecord]]
    num_issued: int


def note_timeline(case: Case, records: Sequence[CollectiveRecord], spans: Spans) -> RankTimeline:
    """Return the timeline of this rank in the step of the records."""
    places: dict[int, tuple[str, str]] = {}
    # From the outer modules to the inner ones: the last that is written is the innermost.
    for (direction, module), passes in sorted(spans.items(), key=lambda item: len(item[0][1])):
        for begin, end in passes:
            places.update(dict.fromkeys(range(begin + 1, end + 1), (direction, module)))
    kept = records[: MOST_IN_ALL // case.layout.world_size]
    return RankTimeline(
        [(_name_kind(case, record, places.get(record.number)), record) for record in kept], len(records)
    )


def _name_kind(case: Case, record: CollectiveRecord, place: tuple[str, str] | None) -> CollectiveKind:
    direction, module = place or (None, "")
    axis = name_ranks(case, record.group)
    return CollectiveKind(op=record.op, axis=axis, module=module, direction=cast(Direction | None, direction))


def join_timelines(step: int, by_rank: Sequence[RankTimeline]) -> Timeline | None:
    """Return the timeline of all ranks; None where no rank issued anything."""
    starts = [record.started or 0.0 for each in by_rank for _, record in each.collectives]
    if not starts:
        return None
    first = min(starts)
    kinds: dict[CollectiveKind, int] = {}
    ranks = tuple(
        tuple(
            TimedCollective(
                kind=kinds.setdefault(kind, len(kinds)),
                started=round((record.started or first) - first, 6),
                seconds=None if record.seconds is None else round(record.seconds, 6),
            )
            for kind, record in each.collectives
        )
        for each in by_rank
    )
    return Timeline(
        step=step, kinds=tuple(kinds), ranks=ranks, num_issued=tuple(each.num_issued for each in by_rank)
    )
