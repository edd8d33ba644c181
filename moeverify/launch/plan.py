"""The plan of a launch: its jobs in order, and where their files go. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from moeverify.results.failure import JobFailure
from moeverify.results.record import Record
from moeverify.results.run import RankReport

Device = Literal["cpu", "cuda"]
Carrier = Literal["gloo", "nccl"]
"""What carries the collectives of tensors on the device of the ranks."""
Backend = Literal["auto", "gloo", "nccl"]
"""The carrier that is asked for on GPUs; `auto` is NCCL wherever each rank has a GPU of its own, and else gloo."""


class Job(Record):
    """One job for the first `num_ranks` ranks of a launch.

    `timeout` is in seconds and covers the building of the groups, the work, and the teardown; `grace` are
    further seconds that a job gets once it has asked for them, having reported what may not be lost; `payload` is
    handed to the ranks unchanged and must be JSON data. `keeps_meshes` says that it builds no device mesh but those
    that it admits (see `moeverify.launch.caches`).
    """

    name: str
    num_ranks: Annotated[int, Field(ge=1)]
    timeout: Annotated[float, Field(gt=0.0)] = 120.0
    payload: dict[str, Any] = Field(default_factory=dict)
    keeps_meshes: bool = False
    grace: Annotated[float, Field(ge=0.0)] = 0.0

    @field_validator("payload")
    @classmethod
    def _is_json(cls, payload: dict[str, Any]) -> dict[str, Any]:
        json.dumps(payload)
        return payload


class Plan(Record):
    """One launch: its jobs with their place in the whole run, and the folders it writes to.

    `folder` is the folder of the run, `launch_folder` that of this launch; `first` is the index of the first
    job in the run, so that a second launch goes on counting. `search_path` holds the controller's import
    path, which the ranks append to their own.
    """

    jobs: tuple[Job, ...]
    entry: str
    num_ranks: int
    device: Device = "cpu"
    backend: Backend = "auto"
    folder: Path
    launch_folder: Path
    first: int = 0
    search_path: tuple[str, ...] = ()

    def job_folder(self, position: int) -> Path:
        """Return the folder of the job at `position` of this launch."""
        return job_folder(self.folder, self.first + position)

    def write(self, path: Path) -> None:
        """Write the plan as JSON."""
        write_atomically(path, self.model_dump_json(indent=1))

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Return the plan that `write` wrote."""
        return cls.model_validate_json(path.read_text())


class JobOutcome(Record):
    """What became of a job: its result, or why there is none.

    `state` is `done`, `failed` (a rank raised or died), `hung` (over its timeout) or `unstarted` (no launch
    came up for it, or an external launch ended before it); unless it is done there is a `failure`. `rank_reports`
    holds every rank of a job that failed or hung, the originating ranks first. `seconds` is wall time on the ranks;
    `launch` counts from 1.
    """

    job: str
    index: int
    state: Literal["done", "failed", "hung", "unstarted"]
    result: dict[str, Any] | None = None
    failure: JobFailure | None = None
    rank_reports: tuple[RankReport, ...] = ()
    seconds: float = 0.0
    launch: int = 0


class LaunchEvent(Record):
    """Something that happened during a launch, for a progress view.

    `launch`: a launch of `num_ranks` begins; `up`: its ranks run; `start` and `end`: of a job; `report`: a
    rank reported `detail`; `lost`: a launch died between two jobs, by `failure`.
    """

    kind: Literal["launch", "up", "start", "report", "end", "lost"]
    job: str = ""
    num_ranks: int = 0
    detail: str = ""
    failure: JobFailure | None = None
    outcome: JobOutcome | None = None


def job_folder(folder: Path, index: int) -> Path:
    """Return the folder of the job with this index in the run; a name may hold characters a path may not."""
    return folder / "jobs" / f"{index:04d}"


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the whole file or none, even when the writer is killed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)
