"""What `moeverify bench` measures, as plain data. No torch.

Units: seconds, bytes, bytes a second, operations a second; of one rank, the slowest where they differ.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import AliasChoices, Field

from moeverify.results.record import Record


class Spread(Record):
    """The middle and the ends of repeated measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(median=statistics.median(values), least=min(values), most=max(values))


class Traffic(Record):
    """One kind of collective in one step: how often, for how long, and what it moved.

    `seconds` is the time it occupied, overlapped with computation or not, waiting for slower ranks included.
    `bus_bandwidth` is what the busiest link carried, as nccl-tests count it; None where the profiler saw no
    sizes.
    """

    kind: str
    count: int
    seconds: float
    payload: float | None = None
    bus_bandwidth: float | None = None


class Operations(Record):
    """What a rank asks of its device: operations that compute, copy or fill, collectives, and waits of the host.

    Of a GPU each operation is a launch at least. `traffic` is the bytes that operations read and write one by one.
    """

    kernels: int
    collectives: int
    waits: int
    traffic: int | None = None


class DeviceWork(Record):
    """What a GPU was given in one profiled step: kernels, copies and fills, and how often the host waited for it.

    `busy` is the time in which any of them ran, collectives included.
    """

    launches: int
    waits: int
    busy: float


Interval = tuple[float, float]
"""When something began, and how long it took. Units: seconds from the beginning of a step."""


class Work(Record):
    """One kind of work in a profiled step: how many kernels of a GPU, or operators of a CPU, and their time."""

    kind: str
    count: int
    seconds: float


class RankStep(Record):
    """When a rank computed and communicated in a profiled step; what is near each other is one interval.

    `computed` is the time in which anything but a collective ran, and `idle` that in which nothing did: a GPU then
    waits for its host, or a CPU for Python and other ranks.
    """

    seconds: float
    computed: float
    idle: float
    computing: tuple[Interval, ...]
    communicating: dict[str, tuple[Interval, ...]]


class Roofline(Record):
    """What parts of the machine do alone, measured on the ranks of the case before it.

    `matmul` is one large matrix product in the precision of the recipe; `experts` are the experts of one layer,
    forward and backward, with as many tokens as they get on average, alone on each rank. `copying` is the bytes a
    second that one large copy reads and writes, `launch` the seconds in which a host dispatches one small operation.
    Collectives are by kind, bus bandwidth.
    """

    matmul: float
    copying: float | None = None
    launch: float | None = None
    experts: float | None = None
    collectives: dict[str, float] = Field(default_factory=dict)


class Measurement(Record):
    """The cost of one case. `reason` says why there are no numbers.

    `flops` counts model operations a second of one rank: what the layout computes again does not count.
    `exposed` is the part of a step in which only collectives ran, None where the profile does not show it.
    `in_micro_batches` are the operations of all forward and backward passes of a step, `in_update` those of the rest.
    `swept` are the fields that a sweep has set, by their paths.
    `work` is what rank 0 did in a profiled step, and `profile` when each rank did it, where a profile was asked for.
    """

    name: str
    file: str = ""
    swept: dict[str, str] = Field(default_factory=dict)
    ranks: int
    layout: str = ""
    recipe: str = ""
    reason: str = ""
    step: Spread | None = None
    tokens_per_second: float | None = None
    flops: float | None = None
    peak_memory: float | None = None
    parameters: float | None = None
    communication: float | None = None
    exposed: float | None = None
    device: DeviceWork | None = None
    micro_batches: int = 1
    in_micro_batches: Operations | None = None
    in_update: Operations | None = None
    traffic: tuple[Traffic, ...] = ()
    work: tuple[Work, ...] = ()
    profile: tuple[RankStep, ...] = ()
    roofline: Roofline | None = Field(
        default=None, validation_alias=AliasChoices("roofline", "floors"), serialization_alias="floors"
    )


class BenchRun(Record):
    """A whole `moeverify bench`: what was asked, on what, and the cases side by side."""

    environment: dict[str, str]
    command: str = ""
    started: str = ""
    seconds: float = 0.0
    warmup: int
    steps: int
    cases: tuple[Measurement, ...]
