"""The rank and world size that torchrun or srun gave this process. Does not import torch."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORTS = range(20000, 30000)  # Below Linux's ephemeral ports, so that no client uses one by chance.


@dataclass(frozen=True)
class ExternalWorld:
    """Position of this process among ranks of an external launcher. `local_rank` counts on its host."""

    launcher: Literal["torchrun", "srun"]
    rank: int
    world_size: int
    local_rank: int


def external_world(environment: Mapping[str, str] | None = None) -> ExternalWorld | None:
    """Return the position of this process, or None if no launcher started it.

    The launcher is `torchrun` whenever RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are all set. The batch
    script of a Slurm job and a Slurm step with one task are not ranks.
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
    """Set the unset variables of torch's `env://` rendezvous; return the position of this process.

    Under srun, the first node of the step's node list is the master. The port is computed from the job id
    and the step id, so all tasks choose the same port without communication.
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
    """Return the first host of a Slurm node list.

    `gpu[03-06,9]-a,login` gives `gpu03-a`.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else nodes)


def find_node() -> str:
    """Return the node name of this process: Slurm's, which is unique in the cluster, or the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def set_interpreter(device: str) -> None:
    """Set TRITON_INTERPRET if `device` is the CPU: Triton cannot compile kernels without a GPU.

    Must be called before Triton is imported, since Triton reads the variable only then.
    """
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
