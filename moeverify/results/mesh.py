"""The device mesh of a case, as data."""

from __future__ import annotations

from moeverify.results.record import Record


class MeshShape(Record):
    """The axes of more than one rank, outermost first, and the ranks of each of their groups.

    `axes` are those by which the batch is divided: the last one varies fastest from rank to rank. `groups` has
    further axes, such as ep and efsdp, which reuse their ranks.
    """

    axes: dict[str, int]
    groups: dict[str, tuple[tuple[int, ...], ...]]
