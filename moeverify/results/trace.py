"""One collective of a rank, as it is recorded, stored in files and sent between ranks. No torch."""

from __future__ import annotations

from typing import Literal

from moeverify.results.record import Record

State = Literal["started", "finished", "failed"]


class CollectiveRecord(Record):
    """One record of a trace. Records from a flight recorder have no times.

    `number` counts all collectives of the rank from 1, and `sequence` the ones of the group. Messages are
    counted separately per peer. `group` has global ranks. `axis` is the mesh axis of the group, or empty.
    `shape` and `dtype` describe this rank's first tensor. `signature` must be equal on all ranks of the
    collective. `peer` is the root, source or destination in the group, or -1. `site` is the first frame
    outside torch.

    Units: `started` in Unix time; `seconds` until completion was observed, which on CUDA is the end of the
    device work.
    """

    number: int
    op: str
    group: tuple[int, ...]
    group_name: str
    axis: str = ""
    sequence: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    num_tensors: int = 0
    signature: str = ""
    peer: int = -1
    site: str = ""
    state: State
    started: float | None = None
    seconds: float | None = None

    @property
    def is_point_to_point(self) -> bool:
        """Return whether it is a message between two ranks, not a collective of the whole group."""
        return self.op in ("send", "recv")

    @property
    def needed_ranks(self) -> tuple[int, ...]:
        """Return the global ranks that must take part; empty for a receive from any source."""
        if not self.is_point_to_point:
            return self.group
        return (self.group[self.peer],) if 0 <= self.peer < len(self.group) else ()
