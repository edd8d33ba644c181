"""Device mesh of a case, as data."""

from __future__ import annotations

from moeverify.results.record import Record


class MeshShape(Record):
    """The mesh axes of more than one rank, outermost first, and the ranks of each of their groups.

    `axes` are the axes that divide the batch; the last axis varies fastest from rank to rank. `groups` also
    has axes such as ep and efsdp, which reuse the same ranks.
    """

    axes: dict[str, int]
    groups: dict[str, tuple[tuple[int, ...], ...]]
