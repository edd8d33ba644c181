"""The same jobs under torchrun, and under srun to the extent that its environment can be simulated."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked.python import ForkedPython

import moeverify
from moeverify.report.words.failure import describe_failure
from moeverify.results.failure import EndKind, RankEnd
from moeverify.verification.launch.plan import Job, JobOutcome

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TRITON_"))},
    "PYTHONPATH": os.pathsep.join(
        [str(Path(moeverify.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    ),
    "OMP_NUM_THREADS": "1",
}
LATE = {"do": "stay_away", "rank": 1}
DIE = {"do": "die", "rank": 1, "signal": "SIGKILL"}


def list_jobs(payload: dict[str, Any]) -> list[Job]:
    return [
        Job(name="both", num_ranks=2),
        Job(name="too large", num_ranks=3),
        Job(name="one", num_ranks=1),
        Job(name="special", num_ranks=2, timeout=3.0 if payload == LATE else 120.0, payload=payload),
        Job(name="last", num_ranks=2),
    ]


def make_arguments(programs: Path, folder: Path, payload: dict[str, Any]) -> list[str]:
    plan = json.dumps([job.model_dump() for job in list_jobs(payload)])
    return [str(programs / "external.py"), str(folder), plan]


def read_outcomes(text: str) -> list[JobOutcome]:
    return [JobOutcome.model_validate_json(line) for line in text.splitlines() if line.startswith("{")]


def run_torchrun(
    torchrun: list[str], programs: Path, folder: Path, payload: dict[str, Any]
) -> tuple[int, list[JobOutcome]]:
    ended = subprocess.run(
        [*torchrun, *make_arguments(programs, folder, payload)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, read_outcomes(ended.stdout)


def run_srun(
    python: list[str], programs: Path, folder: Path, payload: dict[str, Any]
) -> tuple[list[int], list[JobOutcome]]:
    """Run two tasks with srun's variables for a step of two tasks, and a free port."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    step = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(port),
    }
    tasks = [
        subprocess.Popen(
            [*python, *make_arguments(programs, folder, payload)],
            env={**ENVIRONMENT, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [task.communicate(timeout=120)[0] for task in tasks]
    return [task.returncode for task in tasks], read_outcomes(texts[0])


def check_common(outcomes: list[JobOutcome]) -> None:
    assert [outcome.job for outcome in outcomes] == ["both", "too large", "one", "special", "last"]
    assert outcomes[0].result is not None
    assert outcomes[0].result["total"] == 3.0
    assert outcomes[1].state == "unstarted"
    assert describe_failure(outcomes[1].failure) == "it needs 3 ranks, and 2 were started"
    assert outcomes[2].result is not None
    assert outcomes[2].result["total"] == 1.0


def check_hang(outcomes: list[JobOutcome]) -> None:
    check_common(outcomes)
    special, last = outcomes[3:]
    assert special.state == "hung"
    assert re.match(
        r"over its 3 s \(raise --timeout; load [^)]+\): rank 0 waits in all_reduce #2 of group \(0,1\)",
        describe_failure(special.failure),
    )
    assert "rank 1 never entered it: it is at " in describe_failure(special.failure)
    assert [(report.rank, report.state) for report in special.rank_reports] == [(1, "hung"), (0, "hung")]
    assert "time.sleep(1000)" in special.rank_reports[0].stack
    assert last.state == "unstarted"
    assert describe_failure(last.failure) == "the ranks ended with job special"


def test_torchrun_runs_all_jobs_on_the_same_ranks(
    python: ForkedPython, programs: Path, tmp_path: Path
) -> None:
    code, outcomes = run_torchrun(python.torchrun(2, "--standalone"), programs, tmp_path, {})
    assert code == 0
    check_common(outcomes)
    assert [outcome.state for outcome in outcomes] == ["done", "unstarted", "done", "done", "done"]
    assert outcomes[0].result is not None
    assert outcomes[4].result is not None
    assert outcomes[0].result["pids"] == outcomes[4].result["pids"]


def test_torchrun_on_two_hosts(programs: Path, tmp_path: Path) -> None:
    """Each host is an agent with its own address and disk."""
    hosts = ("127.0.0.2", "127.0.0.3")
    with socket.socket() as probe:
        probe.bind((hosts[0], 0))
        port = probe.getsockname()[1]
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
                *(f"--node-rank={number}", f"--master-addr={hosts[0]}", f"--master-port={port}"),
                f"--local-addr={host}",
                *make_arguments(programs, tmp_path / host, DIE),
            ],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for number, host in enumerate(hosts)
    ]
    texts = [agent.communicate(timeout=120)[0] for agent in agents]
    outcomes = read_outcomes(texts[0])
    check_common(outcomes)
    assert [outcome.state for outcome in outcomes[3:]] == ["failed", "unstarted"]
    assert {(report.rank, report.state) for report in outcomes[3].rank_reports} == {
        (1, "lost"),
        (0, "stopped"),
    }
    assert not read_outcomes(texts[1])
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("127")) == list(hosts)


def test_torchrun_with_a_hang(python: ForkedPython, programs: Path, tmp_path: Path) -> None:
    code, outcomes = run_torchrun(python.torchrun(2, "--standalone"), programs, tmp_path, LATE)
    assert code == 1
    check_hang(outcomes)


def test_torchrun_with_a_rank_that_is_killed(python: ForkedPython, programs: Path, tmp_path: Path) -> None:
    code, outcomes = run_torchrun(python.torchrun(2, "--standalone"), programs, tmp_path, DIE)
    assert code == 1
    check_common(outcomes)
    assert outcomes[3].state == "failed"
    origin, peer = outcomes[3].rank_reports
    assert (origin.rank, origin.state) == (1, "lost")
    assert (peer.rank, peer.state) == (0, "stopped")
    assert "in die" in peer.stack
    assert outcomes[4].state == "unstarted"


def test_srun_runs_all_jobs(programs: Path, tmp_path: Path) -> None:
    codes, outcomes = run_srun([sys.executable], programs, tmp_path, {})
    assert codes == [0, 0]
    check_common(outcomes)
    assert outcomes[4].state == "done"


def test_srun_with_a_hang_ends_every_task(python: ForkedPython, programs: Path, tmp_path: Path) -> None:
    codes, outcomes = run_srun(python.command(), programs, tmp_path, LATE)
    assert codes == [3, 3]
    check_hang(outcomes)


@pytest.mark.parametrize("rank", [0, 1])
def test_srun_with_a_rank_that_raises_ends_every_task(
    python: ForkedPython, programs: Path, tmp_path: Path, rank: int
) -> None:
    codes, outcomes = run_srun(python.command(), programs, tmp_path, {"do": "fail", "rank": rank})
    assert codes == [3, 3]
    check_common(outcomes)
    origin = outcomes[3].rank_reports[0]
    assert (origin.rank, origin.state) == (rank, "raised")
    assert origin.end == RankEnd(how=EndKind.RAISED, error="ArithmeticError: the sum does not add up")


def test_srun_with_a_rank_that_raises_wakes_a_peer_outside_any_collective(
    python: ForkedPython, programs: Path, tmp_path: Path
) -> None:
    codes, outcomes = run_srun(python.command(), programs, tmp_path, {"do": "fail_among_sleepers", "rank": 0})
    assert codes == [3, 3]
    origin, peer = outcomes[3].rank_reports
    assert (origin.rank, origin.state) == (0, "raised")
    assert (peer.rank, peer.state) == (1, "stopped")
    assert "time.sleep(1000)" in peer.stack
