"""How the golden in git stands to what this machine computes, as data. No torch."""

from __future__ import annotations

from typing import Literal

from moeverify.results.record import Record

GoldenStatus = Literal["recorded", "missing", "changed", "differs", "unreadable", "failed"]


class Deviation(Record):
    """The fingerprint that is furthest from the recorded one, relative to its norm."""

    name: str
    distance: float
    limit: float


class GoldenState(Record):
    """Whether the golden in git is that of the recipe.

    `recorded` and `current` are fingerprints of recipes, `case_file` that of a case that uses it. `error` says why it
    could not be read or made, and `remedy` what to do. `damage` is what was wrong with the full golden in the cache,
    which was made again. `seconds` is how long this run took to make it, None where it was kept. `deviation` is from
    the golden of the same class of devices, and `across` from that of a CPU in `across_path`, where the devices are
    GPUs.
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


class GoldenRow(Record):
    """What became of one golden, named by its file."""

    name: str
    status: Literal["recorded", "refreshed", "unchanged", "missing", "differs", "unused"]
    state: GoldenState | None = None
