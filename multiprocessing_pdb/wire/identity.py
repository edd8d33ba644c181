"""The identity of a rank: job, label, host and process, partly read from the launcher's environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class RankIdentity:
    """One stopped thread of one process of a job.

    `label` is unique in a job: "3" for rank 3, "3.p71" for a child process of rank 3, and "p71" for a
    process without a rank. In any thread but the main one, ".t72" is appended.
    """

    job: str
    label: str
    number: int | None
    world: int | None
    host: str
    pid: int
    start: int  # start of the process in clock ticks since boot, because pids are reused

    def file_stem(self) -> str:
        """Return the prefix of the names of this rank's files in the runtime directory."""
        return f"{self.job}+{self.label}+{self.pid}-{self.start}"


@dataclass(frozen=True)
class FileOwner:
    """The process that wrote a file in the runtime directory, parsed from the file's name."""

    job: str
    label: str
    pid: int
    start: int

    @classmethod
    def parse(cls, stem: str) -> FileOwner:
        """Return the owner; pid 0 if the name was not written by a rank."""
        job, _, rest = stem.partition("+")
        label, _, process = rest.rpartition("+")
        pid, _, start = process.partition("-")
        numbers = (int(pid), int(start)) if pid.isdecimal() and start.isdecimal() else (0, 0)
        return cls(job, label, *numbers)


def name_job(environ: Mapping[str, str], process_group: int) -> str:
    """Return the name that all processes of one run share, derived from the launcher's environment."""
    run_id = environ.get("TORCHELASTIC_RUN_ID", "none")
    if environ.get("MPDB_JOB"):
        name = environ["MPDB_JOB"]
    elif run_id not in ("", "none"):
        name = run_id
    elif environ.get("SLURM_JOB_ID"):
        name = f"slurm{environ['SLURM_JOB_ID']}"
    elif environ.get("MASTER_PORT") and environ.get("RANK"):
        name = f"port{environ['MASTER_PORT']}"
    else:
        name = f"pg{process_group}"
    return _UNSAFE.sub("_", name)[:40] or "job"


def _parse(environ: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return None


def read_rank(environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return rank and world size from the environment, None where unknown."""
    return (
        _parse(environ, "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
        _parse(environ, "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    )
