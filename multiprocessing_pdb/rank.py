"""Who am I: job, rank, host, process. Asked at a stop only, and without any collective."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from multiprocessing_pdb.processes import read_environ

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Rank:
    """One stopped thread of one process of a job.

    `label` is unique in a job: "3" for rank 3, "3.p71" for a child process of rank 3, "p71" for a process
    that has no rank, and ".t72" is added in any thread but the main one.
    """

    job: str
    label: str
    number: int | None
    world: int | None
    host: str
    pid: int

    def file_stem(self) -> str:
        """Return the beginning of the names of this rank's files in the runtime directory."""
        return f"{self.job}+{self.label}+{self.pid}"


def name_job(environ: Mapping[str, str], process_group: int) -> str:
    """Return the name that all processes of one run share, from their launcher's environment."""
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
    """Return rank and world size as the environment tells them, None where it does not."""
    return (
        _parse(environ, "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
        _parse(environ, "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    )


def _ask_torch() -> tuple[int | None, int | None]:
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
    except (AttributeError, RuntimeError, ValueError):  # half imported, or being torn down
        pass
    return None, None


def _inherits_rank(number: int | None) -> bool:
    """Tell whether our rank is only the parent's: a data loader's worker inherits it and is not that rank."""
    loader = sys.modules.get("torch.utils.data")
    if loader is not None and loader.get_worker_info() is not None:
        return True
    context = sys.modules.get("multiprocessing.process")
    parent = context.parent_process() if context is not None else None
    if parent is None:
        return False
    inherited, _ = read_rank(read_environ(parent.pid or 0))
    return inherited == number


def identify() -> Rank:
    """Return who the calling thread is: torch.distributed knows best when it is up, then the environment."""
    pid = os.getpid()
    number, world = _ask_torch()
    if number is None:
        number, world = read_rank(os.environ)
    label = f"p{pid}" if number is None else str(number)
    if number is not None and _inherits_rank(number):
        label, number = f"{number}.p{pid}", None
    if threading.current_thread() is not threading.main_thread():
        label, number = f"{label}.t{threading.get_native_id()}", None
    job = name_job(os.environ, os.getpgrp())
    return Rank(job, label, number, world, socket.gethostname(), pid)
