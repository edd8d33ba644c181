"""One collective that a rank has issued, as it is recorded, kept in files and sent between ranks. No torch."""

from __future__ import annotations

from typing import Literal

from moeverify.results.record import Record

State = Literal["started", "finished", "failed"]


class CollectiveRecord(Record):
    """A record of a trace; those that a flight recorder has kept are without times.

    `number` counts all collectives of the rank from 1, `sequence` those of the group; messages count apart, per
    peer. `group` are global ranks, `axis` is the mesh axis that the group was made for, or empty. `shape` and `dtype`
    are those of this rank's first tensor. `signature` must be the same on all ranks that meet in it. `peer` is the
    root, source or destination in the group, or -1. `site` is the first frame outside torch. Units: `started` in Unix
    time, `seconds` until it was seen to be over; on CUDA that is when the device is through.
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
        """Return whether it is a message between two ranks and not a collective of the whole group."""
        return self.op in ("send", "recv")
