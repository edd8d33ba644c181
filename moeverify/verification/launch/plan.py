"""The plan of a launch: its jobs in order, and the paths of their files. Does not import torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from moeverify.results.failure import JobFailure
from moeverify.results.record import Record
from moeverify.results.run import RankReport

USED_UP_FILE = "used-up"
"""File in the folder of a launch whose ranks run no further job, since the last one changed their process."""

CLOCK_FILE = "clock"
"""File in the folder of a launch with the time that its limits count; see `moeverify.verification.launch.clock`."""

Device = Literal["cpu", "cuda"]
Carrier = Literal["gloo", "nccl"]
"""Backend of the collectives of tensors on the device of the ranks."""
Backend = Literal["auto", "gloo", "nccl"]
"""Requested backend on GPUs. `auto` is NCCL if each rank has its own GPU, and gloo otherwise."""


class Job(Record):
    """One job for the first `num_ranks` ranks of a launch.

    `timeout` in seconds covers the creation of the process groups, the work and the teardown. `grace` is
    additional time in seconds that a job gets once it calls `RankContext.extend`. `payload` is passed to
    the ranks unchanged and must be JSON data. `keeps_meshes` states that the job admits every device mesh
    it builds (see `moeverify.verification.launch.caches`).
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


class LaunchPlan(Record):
    """One launch: its jobs, their position in the whole run, and the output folders.

    `folder` is the folder of the run and `launch_folder` the folder of this launch. `first` is the index of
    the first job in the run, so that a second launch continues the count. `search_path` is the import path
    of the controller, which the ranks append to their own.
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
        write_atomically(path, self.model_dump_json(indent=1))

    @classmethod
    def read(cls, path: Path) -> LaunchPlan:
        return cls.model_validate_json(path.read_text())


class JobOutcome(Record):
    """Outcome of a job: its result, or the failure that prevented one.

    `state` is `done`, `failed` (a rank raised or died), `hung` (timeout) or `unstarted` (the launch did not
    come up, or an external launch ended earlier). Every state but `done` has a `failure`. `rank_reports`
    holds all ranks of a job that failed or hung, the originating ranks first. `seconds` is wall time on the
    ranks. `launch` counts from 1.
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
    """An event of a launch, for progress display.

    `launch`: a launch of `num_ranks` begins. `up`: its ranks run. `start` and `end`: a job begins or ends.
    `report`: rank 0 reported `detail`. `lost`: the launch died between two jobs with `failure`.
    """

    kind: Literal["launch", "up", "start", "report", "end", "lost"]
    job: str = ""
    num_ranks: int = 0
    detail: str = ""
    failure: JobFailure | None = None
    outcome: JobOutcome | None = None


def job_folder(folder: Path, index: int) -> Path:
    """Return the folder of a job by its index in the run.

    A job name may contain characters that are invalid in paths.
    """
    return folder / "jobs" / f"{index:04d}"


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the whole file or none, even when the writer is killed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)
