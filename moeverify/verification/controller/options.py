"""Options of a run that are not part of its cases. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moeverify.verification.launch.plan import Backend


@dataclass(frozen=True)
class RunOptions:
    """Options for running cases.

    `backend` is used on GPUs; the default is gloo if ranks share a GPU. `num_ranks` limits the number of
    ranks. `folder` keeps all files of the run. With `require_goldens`, a missing recorded golden is an
    error. `cache_folder` holds full goldens. `fault` names a function that every rank of a case calls
    before it builds the layout; `case_faults` overrides it by case name. `without` names hypotheses that
    are not tried. With `must_decide`, a case that decides too few tensors is undecided instead of a pass.
    `sketch` says when cases are judged by goldens of sketches: never, if only such a golden is stored
    (`found`), or always. With `widened`, policies of mixed precision have no effect: the run is one of a
    narrower case.

    Units: `timeout` in seconds, for each golden and for each case instead of its own timeout;
    `explain_seconds` in seconds, for the search for the first wrong operation of a case (0 disables it).
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Backend = "auto"
    num_ranks: int | None = None
    folder: Path | None = None
    require_goldens: bool = False
    golden_folder: Path | None = Path("golden")
    cache_folder: Path | None = None
    timeout: float | None = None
    fault: str | None = None
    case_faults: Mapping[str, str] = field(default_factory=dict)
    explain_seconds: float = 60.0
    without: tuple[str, ...] = ()
    must_decide: bool = False
    sketch: Literal["never", "found", "always"] = "never"
    widened: bool = False
