"""The options of a run, beside its cases. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moeverify.launch.plan import Backend


@dataclass(frozen=True)
class RunOptions:
    """How to run cases.

    `backend` carries the collectives of GPUs; by itself it is gloo where ranks share them.
    `num_ranks` limits the ranks; `folder` keeps everything of the run; `require_goldens` makes a golden that
    is not recorded an error; `cache_folder` holds full goldens; `fault` is called on every rank of a case
    before its layout is built, `case_faults` has other ones for single cases by name. Units: `timeout` in
    seconds, for each case, in place of its own, and for each golden; `explain_seconds` in seconds, for the search for
    the first wrong operation of a case, where 0 leaves it out. `without` has the names of hypotheses that are not
    tried.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Backend = "auto"
    num_ranks: int | None = None
    folder: Path | None = None
    require_goldens: bool = False
    golden_folder: Path = Path("golden")
    cache_folder: Path | None = None
    timeout: float | None = None
    fault: str | None = None
    case_faults: Mapping[str, str] = field(default_factory=dict)
    explain_seconds: float = 60.0
    without: tuple[str, ...] = ()
