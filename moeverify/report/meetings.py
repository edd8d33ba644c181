"""The collectives of several ranks in one order: those in which ranks meet stand in one column."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moeverify.results.trace import CollectiveRecord

Key = tuple[object, ...]


@dataclass(frozen=True)
class Meeting:
    """A collective: the record of each rank that issued it, and the ranks that others still wait for."""

    records: Mapping[int, CollectiveRecord]
    missing: frozenset[int] = frozenset()

    @property
    def open_ranks(self) -> list[int]:
        """Return the ranks that did not see its end."""
        return [rank for rank, record in self.records.items() if record.state != "finished"]

    @property
    def disagrees(self) -> bool:
        """Return whether its ranks issued what cannot meet."""
        records = self.records.values()
        return len({record.signature for record in records if not record.is_point_to_point}) > 1


def align_records(traces: Mapping[int, Sequence[CollectiveRecord]]) -> list[Meeting]:
    """Return the collectives of all ranks so that each rank's own stand in its order.

    A collective comes when all ranks that have issued it have come to it. Where they wait for each other in a circle,
    the one that the lowest rank waits in comes next, and what others have of it comes later on its own.
    """
    queues = {rank: deque(trace) for rank, trace in traces.items()}
    ahead: dict[Key, int] = {}  # how many ranks still have to come to each collective
    for rank, trace in traces.items():
        for record in trace:
            key = _identify(rank, record)
            ahead[key] = ahead.get(key, 0) + 1
    meetings = []
    while any(queues.values()):
        heads: dict[Key, list[int]] = {}
        for rank in sorted(queues):
            if queues[rank]:
                heads.setdefault(_identify(rank, queues[rank][0]), []).append(rank)
        ready = [key for key, ranks in heads.items() if len(ranks) == ahead[key]] or [next(iter(heads))]
        for key in ready:
            ahead[key] -= len(heads[key])
            records = {rank: queues[rank].popleft() for rank in heads[key]}
            meetings.append(Meeting(records, _find_missing(records, traces)))
    return meetings


def _identify(rank: int, record: CollectiveRecord) -> Key:
    """Return what ranks that meet have in common: they may issue different operations there."""
    if not record.is_point_to_point:
        return record.group_name, record.group, record.sequence
    return record.group_name, record.group, record.sequence, frozenset((rank, *_list_members(record)))


def _list_members(record: CollectiveRecord) -> tuple[int, ...]:
    """Return the global ranks that a record needs; of a message from anybody, none."""
    if not record.is_point_to_point:
        return record.group
    return (record.group[record.peer],) if 0 <= record.peer < len(record.group) else ()


def _find_missing(
    records: Mapping[int, CollectiveRecord], traces: Mapping[int, Sequence[CollectiveRecord]]
) -> frozenset[int]:
    """Return the ranks that have not come to a collective which a rank is still in."""
    waiting = [(rank, record) for rank, record in records.items() if record.state == "started"]
    return frozenset(
        member
        for rank, record in waiting
        for member in _list_members(record)
        if member != rank and member not in records and not _has_passed(rank, record, member, traces)
    )


def _has_passed(
    rank: int, record: CollectiveRecord, member: int, traces: Mapping[int, Sequence[CollectiveRecord]]
) -> bool:
    """Return whether a member is known to have issued this collective of its group, or a later one."""
    own = _identify(rank, record)
    for other in traces.get(member, ()):
        theirs = _identify(member, other)
        if theirs[:2] == own[:2] and theirs[3:] == own[3:] and other.sequence >= record.sequence:
            return True
    return False
