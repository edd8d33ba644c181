"""Analysis of a hang from the traces of all ranks: pending collectives, absent ranks and disagreements.

Does not import torch, because the controller also analyzes the traces that killed ranks left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moeverify.results.failure import Absence, Disagreement, Hang, Wait, Waiting
from moeverify.results.trace import CollectiveRecord

How = Literal["in another of the group", "has left", "never entered", "queued"]
Traces = Mapping[int, Sequence[CollectiveRecord]]
"""The last collectives of each rank, oldest first."""


@dataclass(frozen=True)
class HangView:
    """A hang, with the collective that each rank waits in.

    `late` are the ranks in no collective, for which the others wait.
    """

    hang: Hang
    waiting: Mapping[int, Waiting]
    late: Sequence[int]


def find_waits(traces: Traces, places: Mapping[int, str], ended: Collection[int] = ()) -> HangView:
    """Return which ranks wait for which.

    `places` holds the code location of each rank, if known, and `ended` the ranks without a process.
    """
    pending = {rank: find_open(trace) for rank, trace in traces.items()}
    waiting = {
        rank: Waiting(
            collective=record,
            place=places.get(rank, "") if record is None else "",
            has_ended=record is None and rank in ended,
        )
        for rank, record in pending.items()
    }
    late = [rank for rank, record in pending.items() if record is None]
    gathered: dict[tuple[object, ...], list[int]] = {}
    for rank, record in pending.items():
        if record is not None:
            gathered.setdefault(_identify(record), []).append(rank)
    waits = []
    for ranks in gathered.values():
        record = pending[ranks[0]]
        assert record is not None
        absent = [
            Absence(rank=rank, how=_find_how(record, traces[rank], pending[rank]), waiting=waiting[rank])
            for rank in record.needed_ranks
            if rank not in ranks and rank in traces
        ]
        waits.append(Wait(ranks=tuple(ranks), collective=record, absent=tuple(absent)))
    hang_places = {} if waits else {rank: places.get(rank, "") for rank in late}
    return HangView(Hang(waits=tuple(waits), places=hang_places), waiting, late)


def _identify(record: CollectiveRecord) -> tuple[object, ...]:
    """Return a key that is equal on all ranks that wait in the same collective or for the same message."""
    peer = record.peer if record.is_point_to_point else None
    return record.op, record.sequence, peer, record.group, record.group_name


def find_open(trace: Sequence[CollectiveRecord]) -> CollectiveRecord | None:
    """Return the collective in which a rank waits, or which raised the exception that ended the rank."""
    return next(iter([*find_all_open(trace), *(each for each in trace[-1:] if each.state == "failed")]), None)


def find_all_open(trace: Sequence[CollectiveRecord]) -> list[CollectiveRecord]:
    """Return the collectives that a rank has issued and that have not ended, oldest first."""
    return [record for record in trace if record.state == "started"]


def _find_how(
    record: CollectiveRecord, trace: Sequence[CollectiveRecord], pending: CollectiveRecord | None
) -> How:
    def is_alike(other: CollectiveRecord) -> bool:
        same_kind = other.is_point_to_point == record.is_point_to_point
        return same_kind and (other.group, other.group_name) == (record.group, record.group_name)

    if pending is not None:
        # issued without waiting for the one before it, as NCCL does
        if any(_identify(other) == _identify(record) for other in find_all_open(trace)):
            return "queued"
        return "in another of the group" if is_alike(pending) else "never entered"
    alike = [each.sequence for each in trace if is_alike(each)]
    return "has left" if max(alike, default=0) >= record.sequence else "never entered"


def find_disagreement(traces: Traces) -> Disagreement | None:
    """Return the first collective that the ranks of one group issued differently, within the kept traces."""
    seen: dict[tuple[str, tuple[int, ...], int], dict[int, CollectiveRecord]] = {}
    for rank, trace in traces.items():
        for record in trace:
            if not record.is_point_to_point:
                key = (record.group_name, record.group, record.sequence)
                seen.setdefault(key, {})[rank] = record
    for _, by_rank in sorted(seen.items(), key=lambda item: item[0][2]):
        if len({record.signature for record in by_rank.values()}) > 1:
            return Disagreement(by_rank=by_rank)
    return None
