"""Times of collectives on each rank in the step with the first difference, as plain data."""

from __future__ import annotations

from moeverify.results.observation import Direction
from moeverify.results.record import Record


class CollectiveKind(Record):
    """The common properties of collectives in a timeline: operation, axis of the group, innermost module.

    `module` and `direction` are empty for collectives outside modules, such as the sum of the gradient
    norm.
    """

    op: str
    axis: str
    module: str = ""
    direction: Direction | None = None


class TimedCollective(Record):
    """A collective of one rank: the index of its kind, and its times.

    Units: seconds. `started` counts from the first collective of all ranks. `seconds` is None if no end was
    recorded. Times of different nodes rely on the clocks of the nodes.
    """

    kind: int
    started: float
    seconds: float | None


class Timeline(Record):
    """The collectives of a step by rank.

    `num_issued` counts all collectives of a rank; only the first ones are kept.
    """

    step: int
    kinds: tuple[CollectiveKind, ...]
    ranks: tuple[tuple[TimedCollective, ...], ...]
    num_issued: tuple[int, ...]
