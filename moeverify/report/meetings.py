"""Alignment of the collectives of several ranks into one order, one column per collective."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moeverify.results.trace import CollectiveRecord

Key = tuple[object, ...]


@dataclass(frozen=True)
class PendingCollective:
    """One collective: the records of the ranks that issued it, and the ranks they still wait for."""

    records: Mapping[int, CollectiveRecord]
    missing: frozenset[int] = frozenset()

    @property
    def open_ranks(self) -> list[int]:
        """Return the ranks on which it did not finish."""
        return [rank for rank, record in self.records.items() if record.state != "finished"]

    @property
    def disagrees(self) -> bool:
        """Return whether the ranks issued different signatures (point-to-point records do not count)."""
        records = self.records.values()
        return len({record.signature for record in records if not record.is_point_to_point}) > 1


def align_records(traces: Mapping[int, Sequence[CollectiveRecord]]) -> list[PendingCollective]:
    """Return the collectives of all ranks in one order that preserves the order of each rank.

    A collective is emitted once all ranks that issued it have reached it. If ranks wait for each other in a
    cycle, the collective at the head of the lowest rank is emitted first. The other ranks' records of it
    follow later, as a meeting of their own.
    """
    queues = {rank: deque(trace) for rank, trace in traces.items()}
    ahead: dict[Key, int] = {}  # per collective: how many ranks have not reached it yet
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
            meetings.append(PendingCollective(records, _find_missing(records, traces)))
    return meetings


def _identify(rank: int, record: CollectiveRecord) -> Key:
    """Return the key that all ranks of one collective share, even if they issued different operations."""
    if not record.is_point_to_point:
        return record.group_name, record.group, record.sequence
    return record.group_name, record.group, record.sequence, frozenset((rank, *record.needed_ranks))


def _find_missing(
    records: Mapping[int, CollectiveRecord], traces: Mapping[int, Sequence[CollectiveRecord]]
) -> frozenset[int]:
    """Return the ranks that have not reached a collective in which another rank is still waiting."""
    waiting = [(rank, record) for rank, record in records.items() if record.state == "started"]
    return frozenset(
        member
        for rank, record in waiting
        for member in record.needed_ranks
        if member != rank and member not in records and not _has_passed(rank, record, member, traces)
    )


def _has_passed(
    rank: int, record: CollectiveRecord, member: int, traces: Mapping[int, Sequence[CollectiveRecord]]
) -> bool:
    """Return whether `member` has issued this collective of its group, or a later one."""
    own = _identify(rank, record)
    for other in traces.get(member, ()):
        theirs = _identify(member, other)
        if theirs[:2] == own[:2] and theirs[3:] == own[3:] and other.sequence >= record.sequence:
            return True
    return False
