"""Measurements of `moeverify bench`, as plain data. No torch.

Units: seconds, bytes, bytes per second, operations per second. Values are for one rank, the slowest if
ranks differ.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import AliasChoices, Field

from moeverify.results.record import Record


class Spread(Record):
    """The median and the extremes of repeated measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(median=statistics.median(values), least=min(values), most=max(values))


class Traffic(Record):
    """One kind of collective in one step: the number of calls, their time and their data.

    `seconds` includes waiting for slower ranks and time that overlaps with computation. `bus_bandwidth` is
    the traffic of the busiest link by the definition of nccl-tests, or None if the profiler recorded no
    sizes.
    """

    kind: str
    count: int
    seconds: float
    payload: float | None = None
    bus_bandwidth: float | None = None


class Operations(Record):
    """Operations that a rank issues to its device: computation, copies, fills, collectives and waits.

    A wait blocks the host. On a GPU each operation is at least one launch. `traffic` is the sum of the
    bytes that each operation reads and writes.
    """

    kernels: int
    collectives: int
    waits: int
    traffic: int | None = None


class DeviceWork(Record):
    """The work of a GPU in one profiled step: launches of kernels, copies and fills, and waits of the host.

    `busy` is the time in which any of these ran, including collectives.
    """

    launches: int
    waits: int
    busy: float


Interval = tuple[float, float]
"""Start and duration of an activity. Units: seconds; the start counts from the beginning of the step."""


class KernelTime(Record):
    """One kind of work in a profiled step: the number of GPU kernels or CPU operators, and their time."""

    kind: str
    count: int
    seconds: float


class RankStep(Record):
    """Times in which a rank computed and communicated in a profiled step.

    Adjacent activities form one interval. `computed` is the time in which anything but a collective ran.
    `idle` is the time in which nothing ran: a GPU then waits for its host, or a CPU for Python and other
    ranks.
    """

    seconds: float
    computed: float
    idle: float
    computing: tuple[Interval, ...]
    communicating: dict[str, tuple[Interval, ...]]


class Roofline(Record):
    """Rates of parts of the machine in isolation, measured on the ranks of the case before the case runs.

    `matmul` is one large matrix product in the precision of the recipe. `experts` is the forward and
    backward pass of the experts of one layer, with the average number of tokens, on each rank alone.
    `copying` is the rate in bytes per second at which one large copy reads and writes. `launch` is the time
    in seconds that the host needs to dispatch one small operation. `collectives` are bus bandwidths by
    kind.
    """

    matmul: float
    copying: float | None = None
    launch: float | None = None
    experts: float | None = None
    collectives: dict[str, float] = Field(default_factory=dict)


class Measurement(Record):
    """The cost of one case. `reason` explains missing numbers.

    `flops` is model operations per second on one rank, without recomputation. `exposed` is the part of a
    step in which only collectives ran, or None if the profile does not show it. `in_micro_batches` counts
    the operations of all forward and backward passes of a step, and `in_update` all others. `swept` has the
    fields that a sweep has set, by path. `work` is the work of rank 0 in a profiled step. `profile` has the
    times of each rank, if a profile was requested.
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
    work: tuple[KernelTime, ...] = ()
    profile: tuple[RankStep, ...] = ()
    roofline: Roofline | None = Field(
        default=None, validation_alias=AliasChoices("roofline", "floors"), serialization_alias="floors"
    )


class BenchRun(Record):
    """A run of `moeverify bench`: its options, its environment and its cases."""

    environment: dict[str, str]
    command: str = ""
    started: str = ""
    seconds: float = 0.0
    warmup: int
    steps: int
    cases: tuple[Measurement, ...]
