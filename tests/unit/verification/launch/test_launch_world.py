"""Detection of the launcher of a process from its environment."""

from __future__ import annotations

import pytest

from moeverify.verification.launch.world import (
    ExternalWorld,
    complete_environment,
    external_world,
    find_first_node,
)

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}


def test_a_plain_process_is_no_rank() -> None:
    assert external_world({}) is None
    assert complete_environment({}) is None


def test_torchrun() -> None:
    assert external_world(TORCHRUN) == ExternalWorld("torchrun", rank=3, world_size=4, local_rank=1)


def test_torchrun_inside_a_slurm_step_is_torchrun() -> None:
    world = external_world({**STEP, **TORCHRUN})
    assert world is not None
    assert (world.launcher, world.rank) == ("torchrun", 3)


def test_srun() -> None:
    assert external_world(STEP) == ExternalWorld("srun", rank=5, world_size=8, local_rank=1)


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_ID": None},  # a batch script
        {"SLURM_STEP_NUM_TASKS": "1"},  # an interactive shell in an allocation of many tasks
        {"SLURM_PROCID": None},
    ],
)
def test_slurm_without_ranks(change: dict[str, str | None]) -> None:
    variables = {name: value for name, value in {**STEP, **change}.items() if value is not None}
    assert external_world(variables) is None


def test_srun_sets_what_the_rendezvous_reads() -> None:
    variables = dict(STEP)
    complete_environment(variables)
    assert {name: variables[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu03",
    }
    other = {**STEP, "SLURM_PROCID": "6"}
    complete_environment(other)
    assert other["MASTER_PORT"] == variables["MASTER_PORT"]
    another_step = {**STEP, "SLURM_STEP_ID": "3"}
    complete_environment(another_step)
    assert another_step["MASTER_PORT"] != variables["MASTER_PORT"]


def test_what_the_user_set_stays() -> None:
    variables = {**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    complete_environment(variables)
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "1234")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("gpu[03-06,9],x", "gpu03"),
        ("gpu[7]", "gpu7"),
        ("rack[1-2]n[05,07]-ib,c", "rack1n05-ib"),
    ],
)
def test_first_node(nodes: str, first: str) -> None:
    assert find_first_node(nodes) == first
