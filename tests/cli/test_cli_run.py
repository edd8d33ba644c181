"""`moeverify run` with real ranks: verdicts, files, exit codes and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import psutil
import pytest
from forked.python import ForkedPython

import moeverify
from moeverify.report.formats.json import read_run

pytestmark = pytest.mark.ranks

# A shell that starts pytest in the background disables SIGINT for its children.
CODE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from moeverify.cli import main
main()
"""
# The same with an agent that has already imported torch, for tests independent of startup and shutdown.
FORKED = "from moeverify.verification.launch import monitor\nmonitor.agent_command = lambda: {agent}" + CODE

# Called on every rank before the layout is built.
FAULTS = """\
import os
import time


def halve(patch):
    from moeverify.parallel.ddp import apply_ddp

    @patch.wrap(apply_ddp)
    def apply_halved(original, model, *rest, **named):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)
        return original(model, *rest, **named)


def fail():
    if os.environ["RANK"] == "1":
        raise RuntimeError("rank one gives up")


def stall():
    time.sleep(600)


def stall_in_pairs():
    import torch.distributed as dist

    if dist.get_world_size() == 2:
        stall()
"""

DDP = """\
recipe:
  name: tiny
  model:
    vocab_size: 32
    hidden: 16
    num_layers: 1
    num_heads: 2
    num_kv_heads: 2
    head_dim: 8
    ffn_hidden: 16
  data: {batch: 4, seq_len: 8}
  optimizer: {name: sgd}
  steps: 1
layout: {dp_replicate: 2, data_parallel: ddp}
checks: {repeat: never}
"""

Start = Any


@pytest.fixture
def start(tmp_path: Path, python: ForkedPython) -> Iterator[Start]:
    """Return a function that starts a command on a tiny case. Processes that still run at the end are killed.

    With `forks`, ranks are forked from a process that has imported torch.
    """
    (tmp_path / "ddp.yaml").write_text(DDP)
    (tmp_path / "faults_of_tests.py").write_text(FAULTS)
    path = os.pathsep.join(
        [str(tmp_path), str(Path(moeverify.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    (tmp_path / "scratch").mkdir()
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "scratch")}
    environment = os.environ | variables
    started: list[subprocess.Popen[str]] = []

    def do(*words: str, command: str = "run", forks: bool = False) -> subprocess.Popen[str]:
        code = FORKED.format(agent=python.agent_command()) if forks else CODE
        child = subprocess.Popen(
            [sys.executable, "-c", code, command, "ddp.yaml", "--cache", "cache", *words],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(child)
        return child

    yield do
    for child in started:
        if child.poll() is None:
            child.kill()
        child.communicate()


def test_pass_writes_every_format(start: Start, tmp_path: Path) -> None:
    child = start("--json", "out/r.json", "--junit", "out/r.xml", "--html", "out/r.html", "--out", "kept")
    output, errors = child.communicate(timeout=200)
    assert child.returncode == 0
    assert not errors or errors.startswith("writing ")  # shown after two seconds
    assert output.splitlines()[-1].startswith("pass  1 case: 1 pass; ")
    assert "[1/1] pass     ddp" in output
    run = read_run(tmp_path / "kept")
    assert run.model_dump_json() == read_run(tmp_path / "out" / "r.json").model_dump_json()
    assert run.command.startswith("moeverify ")
    assert run.command.endswith("--out kept")
    assert ET.parse(tmp_path / "out" / "r.xml").getroot().get("tests") == "1"
    assert "ddp" in (tmp_path / "out" / "r.html").read_text()


def test_mismatch_tells_the_finding_and_keeps_the_errors_of_all_tensors(start: Start, tmp_path: Path) -> None:
    child = start(
        *("--fault", "faults_of_tests:halve", "--explain-seconds", "0"),
        *("--quiet", "--json", "r.json", "--plots", "plots"),
        forks=True,
    )
    output, _ = child.communicate(timeout=200)
    assert child.returncode == 1
    assert output.startswith("ddp  MISMATCH  2 ranks")
    assert "scale     actual is 0.5 times expected, cosine 1\n" in output
    kept = "--cache cache --fault faults_of_tests:halve"
    assert f"    moeverify run ddp.yaml -k ddp {kept} --out runs/ddp\n" in output
    (case,) = read_run(tmp_path / "r.json").cases
    maps = {each.check: each for each in case.errors}
    gradient = dict(zip(maps["gradient"].tensors, maps["gradient"].shares, strict=True))
    assert {name for name, (first, *_) in gradient.items() if first > 1e9} == set(gradient)  # 0.5 / 1e-10
    assert {share for row in maps["initial state"].shares for share in row} == {0.0}
    for each in case.errors:  # only values over their bound are findings
        over = {
            (tensor, step)
            for tensor, row in zip(each.tensors, each.shares, strict=True)
            for step, share in zip(each.steps, row, strict=True)
            if share > 1.0
        }
        assert over == {(found.tensor, found.step) for found in case.findings if found.check == each.check}
    assert case.mesh is not None
    assert case.mesh.axes == {"dp_replicate": 2}
    assert (tmp_path / "plots" / "ddp.heat-map.png").is_file()


def test_failed_rank_is_an_error(start: Start, tmp_path: Path) -> None:
    child = start("--fault", "faults_of_tests:fail", "--json", "r.json", forks=True)
    output, _ = child.communicate(timeout=200)
    assert child.returncode == 3
    assert "RuntimeError: rank one gives up" in output
    assert read_run(tmp_path / "r.json").verdict == "error"


def test_missing_golden_fails_where_it_is_required(start: Start, tmp_path: Path) -> None:
    child = start("--require-goldens", "--json", "r.json", forks=True)
    output, errors = child.communicate(timeout=200)
    assert child.returncode != 0
    assert "golden" in output + errors
    assert read_run(tmp_path / "r.json").verdict == "error"


@pytest.mark.parametrize(
    ("number", "word", "code"),
    [
        (signal.SIGINT, "interrupted", 130),
        (signal.SIGTERM, "ended by SIGTERM", 143),  # a server's time limit, or `timeout`
        (signal.SIGHUP, "ended by SIGHUP", 129),  # a closed terminal
    ],
)
def test_an_early_end_keeps_the_files_and_leaves_nothing_else(
    start: Start, tmp_path: Path, number: signal.Signals, word: str, code: int
) -> None:
    child = start("--fault", "faults_of_tests:stall", "--json", "r.json", forks=number != signal.SIGINT)
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("running ddp"):
            break
    ranks = psutil.Process(child.pid).children(recursive=True)
    assert ranks
    child.send_signal(number)
    if number != signal.SIGINT:
        child.send_signal(number)  # both a shell and the kernel signal a closed terminal
    _, errors = child.communicate(timeout=60)
    assert child.returncode == code
    assert errors.splitlines()[-1] == word
    assert [case.reason for case in read_run(tmp_path / "r.json").cases] == [f"{word} while this case ran"]
    assert [path.name for path in (tmp_path / "scratch").glob("moeverify-*")] == []
    end = time.monotonic() + 20
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
        assert time.monotonic() < end, ranks
        time.sleep(0.1)


def test_an_early_end_of_a_reshard_keeps_the_pairs_that_are_done(start: Start, tmp_path: Path) -> None:
    steps = ("--set", "recipe.steps=3", "--set", "checkpoint.after=1")
    fault = ("--fault", "faults_of_tests:stall_in_pairs")
    child = start(*steps, *fault, "--json", "r.json", command="reshard", forks=True)
    for line in child.stdout:
        if line.startswith("running single -> ddp"):
            break
    child.send_signal(signal.SIGINT)
    out, errors = child.communicate(timeout=60)
    assert (child.returncode, errors.splitlines()[-1]) == (130, "interrupted")
    cases = {case.name: case for case in read_run(tmp_path / "r.json").cases}
    assert list(cases) == ["single -> single", "single -> ddp", "ddp -> single", "ddp -> ddp"]
    assert cases["single -> single"].verdict == "pass"
    assert cases["single -> ddp"].reason == "interrupted while this case ran"
    assert cases["ddp -> ddp"].reason == "interrupted"
    assert "1 pass" in out
