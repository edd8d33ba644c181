"""`moeverify run` as a rank of torchrun: losing a rank costs no verdict, no table and no file."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forked.python import ForkedPython

import moeverify

CASE = """\
recipe:
  name: tiny
  model: {vocab_size: 64, hidden: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 8, ffn_hidden: 64}
layout: {dp_shard: 2}
"""
# Rank 0 waits forever in C code, as in a collective of NCCL: another thread must report.
DYING = """
import os, signal
import torch.distributed as dist

def parallelize(model, mesh):
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 is in parallelize"])
        os.kill(os.getpid(), signal.SIGKILL)
    store.set("rank 0 is in parallelize", "")
    store.wait(["what the lost peer would have set"])
"""


@dataclass(frozen=True)
class Lost:
    """Results after the loss: the output, the files, and the file of --keep."""

    text: str
    run: dict[str, Any]
    folder: Path


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory, python: ForkedPython) -> Lost:
    folder = tmp_path_factory.mktemp("lost")
    (folder / "a-first.yaml").write_text(CASE)
    dying = CASE.replace("{dp_shard: 2}", "{dp_replicate: 2, parallelize: 'dying:parallelize'}")
    (folder / "b-dies.yaml").write_text(dying)
    (folder / "c-last.yaml").write_text(CASE)
    (folder / "dying.py").write_text(DYING)
    outputs = ["--json", "run.json", "--junit", "run.xml", "--html", "run.html", "--keep", "kept.jsonl"]
    cases = ["a-first.yaml", "b-dies.yaml", "c-last.yaml"]
    command = [
        *python.torchrun(2, "--standalone"),
        "-m",
        "moeverify",
        "run",
        *cases,
        *outputs,
        "--cache",
        "cache",
        "--device",
        "cpu",
    ]
    path = [str(Path(moeverify.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    ended = subprocess.run(
        command,
        cwd=folder,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "OMP_NUM_THREADS": "1",
            "CI": "",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert (folder / "run.json").exists(), ended.stdout + ended.stderr
    assert ended.returncode == 1  # torchrun's own: one of its ranks has failed
    return Lost(ended.stdout, json.loads((folder / "run.json").read_text()), folder)


def test_every_case_has_its_verdict(lost: Lost) -> None:
    verdicts = {case["name"]: case["verdict"] for case in lost.run["cases"]}
    assert verdicts == {"a-first": "pass", "b-dies": "error", "c-last": "error"}
    assert lost.run["cases"][0]["checks"]
    ends = {report["rank"]: report["state"] for report in lost.run["cases"][1]["rank_reports"]}
    assert ends == {1: "lost", 0: "stopped"}
    assert "b-dies" in lost.run["cases"][2]["reason"]


def test_table_and_files_are_written(lost: Lost) -> None:
    table = lost.text.rpartition("[3/3]")[2]
    for name in ("a-first", "b-dies", "c-last"):
        assert name in table
    assert "1 pass" in table
    assert "2 error" in table
    assert 'name="c-last' in (lost.folder / "run.xml").read_text()
    assert "b-dies" in (lost.folder / "run.html").read_text()
    kept = [json.loads(line) for line in (lost.folder / "kept.jsonl").read_text().splitlines()[1:]]
    assert [row["result"]["name"] for row in kept] == ["a-first"]


def test_the_stack_of_the_rank_that_waited_shows_where(lost: Lost) -> None:
    (peer,) = (report for report in lost.run["cases"][1]["rank_reports"] if report["rank"] == 0)
    assert peer["stack"].startswith("Thread moeverify-jobs")
    assert "in parallelize" in peer["stack"]
