"""State of the golden in git against the values that this machine computes, as data. No torch."""

from __future__ import annotations

from typing import Literal

from moeverify.results.record import Record

GoldenStatus = Literal["recorded", "missing", "changed", "differs", "unreadable", "failed"]


class Deviation(Record):
    """The fingerprint with the largest distance from the recorded one, relative to its norm."""

    name: str
    distance: float
    limit: float


class GoldenState(Record):
    """The state of the golden in git for one recipe.

    `recorded` and `current` are fingerprints of the recipe; `case_file` is a case that uses it. `error` is
    the reason why the golden could not be read or made, and `remedy` the suggested action. `damage`
    describes an error in the full golden of the cache, which was then made again. `seconds` is the time to
    make the golden, or None if it was cached.

    `deviation` is the distance from the golden of the same device class. On GPUs, `across` is the distance
    from the CPU golden in `across_path`.
    """

    status: GoldenStatus
    recipe: str
    path: str
    device_class: str = ""
    case_file: str = ""
    recorded: str = ""
    current: str = ""
    error: str = ""
    remedy: str = ""
    damage: str = ""
    seconds: float | None = None
    deviation: Deviation | None = None
    across: Deviation | None = None
    across_path: str = ""


class GoldenPlan(Record):
    """The predicted cost of a golden of sketches on one device.

    `device_bytes` is the peak of the memory for tensors, `disk_bytes` the size of the files until the
    golden is written, and `record_bytes` the size of the golden. `operations` are those in the precision
    `reference`, and `rate` are operations a second there, measured.
    """

    recipe: str
    device: str
    num_parameters: int
    num_tokens: int
    num_layers: int
    steps: int
    device_bytes: int
    disk_bytes: int
    record_bytes: int
    reference: str
    operations: float
    rate: float
    seconds: float


class GoldenRow(Record):
    """The outcome for one golden, named by its file."""

    name: str
    status: Literal["recorded", "refreshed", "unchanged", "missing", "differs", "unused"]
    state: GoldenState | None = None
