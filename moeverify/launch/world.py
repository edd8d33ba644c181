"""Where torchrun or srun put this process. Reads the environment alone, no torch."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORTS = range(20000, 30000)  # Below Linux's ephemeral ports, so that no client has them by chance.


@dataclass(frozen=True)
class ExternalWorld:
    """The place of this process among ranks that someone else started; `local_rank` counts on its host."""

    launcher: Literal["torchrun", "srun"]
    rank: int
    world_size: int
    local_rank: int


def external_world(environment: Mapping[str, str] | None = None) -> ExternalWorld | None:
    """Return the place of this process, or None when no launcher started it.

    `torchrun` stands for everything that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A Slurm job's
    batch script and a step of one task are not ranks.
    """
    variables = os.environ if environment is None else environment
    if all(name in variables for name in _TORCHRUN):
        rank = int(variables["RANK"])
        local_rank = int(variables.get("LOCAL_RANK", rank))
        return ExternalWorld("torchrun", rank, int(variables["WORLD_SIZE"]), local_rank)
    in_step = "SLURM_STEP_ID" in variables or "SLURM_STEPID" in variables
    num_tasks = int(variables.get("SLURM_STEP_NUM_TASKS") or variables.get("SLURM_NTASKS") or 1)
    if not in_step or "SLURM_PROCID" not in variables or num_tasks < 2:
        return None
    local_rank = int(variables.get("SLURM_LOCALID", 0))
    return ExternalWorld("srun", int(variables["SLURM_PROCID"]), num_tasks, local_rank)


def complete_environment(environment: MutableMapping[str, str] | None = None) -> ExternalWorld | None:
    """Set what torch's `env://` rendezvous reads, as far as it is unset; return the place of this process.

    Under srun the first node of the step's list is the master, and the port follows from the job's and the
    step's number, so that all tasks choose the same without a word.
    """
    variables = os.environ if environment is None else environment
    world = external_world(variables)
    if world is None:
        return None
    variables.setdefault("RANK", str(world.rank))
    variables.setdefault("WORLD_SIZE", str(world.world_size))
    variables.setdefault("LOCAL_RANK", str(world.local_rank))
    if world.launcher == "srun":
        nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or "localhost"
        variables.setdefault("MASTER_ADDR", find_first_node(nodes))
        job = int(variables.get("SLURM_JOB_ID", 0))
        step = int(variables.get("SLURM_STEP_ID") or variables.get("SLURM_STEPID") or 0)
        variables.setdefault("MASTER_PORT", str(_PORTS[(job * 37 + step) % len(_PORTS)]))
    return world


def find_first_node(nodes: str) -> str:
    """Return the first host of a Slurm node list such as `gpu[03-06,9]-a,login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else nodes)


def find_node() -> str:
    """Return the name of the node that this process is on: Slurm's, which is unique there, or else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def set_interpreter(device: str) -> None:
    """Let Triton, where it is installed, interpret kernels on ranks without a GPU, which cannot compile any.

    Triton reads it once, when it is imported.
    """
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
