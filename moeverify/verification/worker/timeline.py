"""One step's collectives by module and in time, on one rank and joined over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from moeverify.cases.axes.groups import name_ranks
from moeverify.cases.schema import Case
from moeverify.explain.fitting.inputs import Issued
from moeverify.results.collective import IssuedCollective
from moeverify.results.observation import Direction
from moeverify.results.timeline import CollectiveKind, TimedCollective, Timeline
from moeverify.results.trace import CollectiveRecord
from moeverify.train.module_taps import FORWARD, Tap
from moeverify.verification.collectives.trace import CollectiveTrace

MOST_IN_ALL = 4000
"""Maximum number of collectives, over all ranks, that a result keeps: about 150 kB of JSON."""

Spans = Mapping[tuple[str, str], Sequence[tuple[int, int]]]
"""Maps (direction, module) to (collectives issued before, collectives issued at the end) of each pass."""


@dataclass(frozen=True)
class RankTimeline:
    """Collectives of one rank in a step, each with its kind.

    `num_issued` also counts the collectives that are not kept.
    """

    collectives: Sequence[tuple[CollectiveKind, CollectiveRecord]]
    num_issued: int


def note_timeline(case: Case, records: Sequence[CollectiveRecord], spans: Spans) -> RankTimeline:
    """Return the timeline of this rank for the records of a step."""
    places: dict[int, tuple[str, str]] = {}
    # Outer modules come first, so that inner modules overwrite them.
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
    """Return the timeline of all ranks, with times relative to the first; None without collectives."""
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


def list_issued(case: Case, tap: Tap, trace: CollectiveTrace) -> dict[str, tuple[IssuedCollective, ...]]:
    """Return the collectives inside each module, forward pass first."""
    records = {record.number: record for record in trace.records()}
    issued: dict[str, tuple[IssuedCollective, ...]] = {}
    for (direction, module), spans in sorted(tap.spans.items(), key=lambda item: item[0][0] != FORWARD):
        numbers = (number for begin, end in spans for number in range(begin + 1, end + 1))
        inside = [records[number] for number in numbers if number in records]
        kinds = _summarize(case, cast(Direction, direction), inside)
        issued[module] = (*issued.get(module, ()), *kinds)
    return issued


def _summarize(
    case: Case, direction: Direction, records: Sequence[CollectiveRecord]
) -> Iterator[IssuedCollective]:
    """Yield one entry for each (operation, group, dtype, call site) in the records of a trace."""
    kinds: dict[tuple[str, tuple[int, ...], str, str], list[CollectiveRecord]] = {}
    for record in records:
        kinds.setdefault((record.op, record.group, record.dtype, record.site), []).append(record)
    for (op, group, dtype, site), members in kinds.items():
        shapes = dict.fromkeys(record.shape for record in members if record.num_tensors)
        yield IssuedCollective(
            direction=direction,
            op=op,
            axis=name_ranks(case, group),
            group=group,
            dtype=dtype if shapes else "",
            shapes=tuple(shapes),
            times=len(members),
            site=site,
        )


def find_issued(issued: Mapping[str, tuple[IssuedCollective, ...]], module: str) -> Issued:
    """Return the collectives inside a module, or inside its nearest ancestor that issued any."""
    around = module
    while around and not issued.get(around):
        around = around.rpartition(".")[0]
    return Issued(around, issued.get(around, ()))
