"""Two nodes of two ranks each under a real Slurm: a step, a batch job that is requeued, a node that dies."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import moeverify

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(900)]

STEP = ("srun", "--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=0", "--wait=60")
BATCH = str(Path(moeverify.__file__).parents[1] / "examples" / "slurm" / "batch.sh")
Cluster = Any
CASE = """\
recipe:
  name: tiny
  model: {vocab_size: 64, hidden: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 8, ffn_hidden: 64}
layout: {dp_shard: 4}
"""
# The second case waits in collectives until it is released: there is time to end the job.
WAIT = """
import os, time
import torch
import torch.distributed as dist

def parallelize(model, mesh):
    may_go = torch.zeros(())
    while not may_go:
        open({here!r}, "w").close()
        time.sleep(0.2)
        may_go.fill_(os.path.exists({go!r}))
        dist.all_reduce(may_go, op=dist.ReduceOp.MIN)
    return torch.nn.parallel.DistributedDataParallel(model)
"""


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    """Return a folder with a case that ends at once and one that waits for the file `go`."""
    folder = tmp_path / "cases"
    folder.mkdir()
    (folder / "a-first.yaml").write_text(CASE)
    own = CASE.replace("{dp_shard: 4}", "{dp_replicate: 4, parallelize: 'waiting:parallelize'}")
    (folder / "b-waits.yaml").write_text(own)
    text = WAIT.format(go=str(tmp_path / "go"), here=str(tmp_path / "here"))
    (folder / "waiting.py").write_text(text)
    return folder


def _moeverify(cluster: Cluster, *words: str) -> tuple[str, ...]:
    return (*STEP, cluster.environment["PYTHON"], "-m", "moeverify", *words)


def _wait_for(condition: Callable[[], object], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.3)


def _submit(cluster: Cluster, cases: Path, log: Path) -> str:
    variables = f"ALL,KEEP={cases.parent / 'kept.jsonl'},MOEVERIFY_CACHE={cases.parent / 'cache'}"
    done = cluster.run("sbatch", "--parsable", f"--export={variables}", f"--output={log}", BATCH, str(cases))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _read_state(cluster: Cluster, job: str) -> str:
    found = re.search(r"JobState=(\w+)", cluster.run("scontrol", "show", "job", job).stdout)
    return found[1] if found else ""


def test_ranks_of_two_nodes_meet_and_name_their_nodes(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "comm.json"
    words = ("all_to_all", "--world-size", "4", "--backward", "--device", "cpu", "--json", str(file))
    done = cluster.run(*_moeverify(cluster, "comm", *words))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("pass  output and gradient") == 1  # only the first rank prints
    hosts = [values["host"] for values in json.loads(file.read_text())["values"]]
    assert hosts == [cluster.nodes[0], cluster.nodes[0], cluster.nodes[1], cluster.nodes[1]]
    for node in cluster.nodes:
        assert node in done.stdout


def test_a_cancelled_job_ends_and_goes_on_with_what_is_left_when_it_is_requeued(
    cluster: Cluster, cases: Path
) -> None:
    log, kept = cases.parent / "job.log", cases.parent / "kept.jsonl"
    job = _submit(cluster, cases, log)
    _wait_for((cases.parent / "here").exists)
    assert _list_finished(kept) == ["a-first"]
    assert cluster.run("scancel", job).returncode == 0
    _wait_for(lambda: _read_state(cluster, job) == "CANCELLED", 60)
    assert [each for node in cluster.nodes for each in _list_ranks(node, cases)] == []
    assert "goes on in a new start" not in log.read_text()  # nobody asked for one
    requeued = cluster.run("scontrol", "requeue", job)
    assert requeued.returncode == 0, requeued.stderr
    (cases.parent / "go").touch()
    _start_again(cluster, job)
    _wait_for(lambda: _read_state(cluster, job) == "COMPLETED")
    text = log.read_text()
    assert f"1 of 2 cases are in {kept}: the others run" in text
    assert re.search(r"pass +2 cases: 2 pass", text), text
    assert _list_finished(kept) == ["a-first", "b-waits"]


def test_a_node_that_dies_costs_no_verdict(cluster: Cluster, cases: Path) -> None:
    log, kept = cases.parent / "job.log", cases.parent / "kept.jsonl"
    job = _submit(cluster, cases, log)
    _wait_for((cases.parent / "here").exists)
    for process in _list_ranks(cluster.nodes[1], cases):
        os.kill(process.pid, signal.SIGKILL)
    _wait_for(lambda: "goes on in a new start" in log.read_text())
    (cases.parent / "go").touch()
    _start_again(cluster, job)
    _wait_for(lambda: _read_state(cluster, job) == "COMPLETED")
    text = log.read_text()
    assert re.search(r"\[2/2\] ERROR +b-waits +rank [23] ", text), text
    # The first start has its own table, although two of its ranks were lost.
    assert re.search(r"ERROR +2 cases: 1 pass, 1 error", text), text
    assert re.search(r"pass +2 cases: 2 pass", text), text
    assert _list_finished(kept) == ["a-first", "b-waits"]


def _start_again(cluster: Cluster, job: str) -> None:
    """Let a requeued job begin again at once; it would wait for two minutes.

    Not in the second of the requeue: slurmd revokes the credentials made until then, and would end the job.
    """
    _wait_for(lambda: _read_state(cluster, job) == "PENDING", 120)
    cluster.run("scontrol", "update", f"jobid={job}", "starttime=now+3")


def _list_finished(kept: Path) -> list[str]:
    """Return the names of the cases in a file of --keep, whose first line describes the run."""
    return [json.loads(line)["result"]["name"] for line in kept.read_text().splitlines()[1:]]


def _list_ranks(node: str, cases: Path) -> list[psutil.Process]:
    """Return the processes of a node that verify these cases."""
    return [
        process
        for process in psutil.process_iter()
        if _read_node(process) == node and str(cases) in " ".join(process.cmdline())
    ]


def _read_node(process: psutil.Process) -> str:
    try:
        return process.environ().get("SLURMD_NODENAME", "")
    except psutil.Error:
        return ""
