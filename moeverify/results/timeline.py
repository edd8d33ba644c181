"""When each rank issued which collective in the step where the first difference is, as plain data."""

from __future__ import annotations

from moeverify.results.observation import Direction
from moeverify.results.record import Record


class CollectiveKind(Record):
    """What collectives of a timeline have in common: the innermost module they are in, the axis of their group.

    `module` and `direction` are empty for what is issued outside of modules, such as the gradient norm's sum.
    """

    op: str
    axis: str
    module: str = ""
    direction: Direction | None = None


class TimedCollective(Record):
    """A collective of one rank: the position of its kind, and when. Units: seconds; `started` since the first of all.

    `seconds` is None where it was not seen to finish. Nodes are compared by their own clocks.
    """

    kind: int
    started: float
    seconds: float | None


class Timeline(Record):
    """The collectives of a step, by rank; `num_issued` counts all of a rank, of which the first ones are kept."""

    step: int
    kinds: tuple[CollectiveKind, ...]
    ranks: tuple[tuple[TimedCollective, ...], ...]
    num_issued: tuple[int, ...]
