"""Device mesh of a case, and the place and data of each rank, as data."""

from __future__ import annotations

from pydantic import Field

from moeverify.results.record import Record


class MeshShape(Record):
    """The mesh axes of more than one rank, outermost first, and the ranks of each of their groups.

    `axes` are the axes that divide the batch; the last axis varies fastest from rank to rank. `groups` also
    has axes such as ep and efsdp, which reuse the same ranks.
    """

    axes: dict[str, int]
    groups: dict[str, tuple[tuple[int, ...], ...]]


class RankPlace(Record):
    """The place of one rank in the mesh and its data.

    `coordinates` maps each axis to the rank's position. `rows` are the global rows of the batch that the
    rank sees, and `positions` the global token positions. `holds` maps other kinds of things, such as
    experts, to their numbers.
    """

    rank: int
    coordinates: dict[str, int]
    rows: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    holds: dict[str, tuple[int, ...]] = Field(default_factory=dict)


class MeshPicture(Record):
    """The contents of a mesh picture: axis sizes (outermost first), ranks, and the groups of each axis.

    `borrowed` holds axes that reuse the ranks of others, such as ep. `per_node` is the number of ranks per
    node, counted from rank 0; 0 if unknown.
    """

    name: str
    axes: dict[str, int]
    ranks: tuple[RankPlace, ...]
    groups: dict[str, tuple[tuple[int, ...], ...]]
    borrowed: dict[str, int] = Field(default_factory=dict)
    per_node: int = 0

    def find_nodes(self, group: tuple[int, ...]) -> list[int]:
        """Return the indices of the nodes that host the ranks of a group."""
        return sorted({rank // self.per_node for rank in group})


class MeshPictures(Record):
    """The facts of `moeverify mesh`."""

    meshes: tuple[MeshPicture, ...]
