"""Scripts that do not use moeverify, each in one guarded run: right ones pass, errors in others are named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked.python import ForkedPython

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def guard(
    out: Path,
    program: str,
    *arguments: str,
    python: ForkedPython,
    options: tuple[str, ...] = (),
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Guard a program on two ranks. `test_watch_hangs` starts it as users do."""
    watch = [*python.command(), "-m", "moeverify", "watch", "--guard", "--out", str(out), *options, "--"]
    command = [*watch, *python.torchrun(2), str(PROGRAMS / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    path = out / "findings.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return done, [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "arguments", [("--autocast",), ("--layout", "fsdp", "--autocast", "--optimizer", "SGD")]
)
def test_a_right_script_is_silent(tmp_path: Path, python: ForkedPython, arguments: tuple[str, ...]) -> None:
    done, findings = guard(tmp_path, "train_layouts.py", *arguments, python=python)
    assert done.returncode == 0, done.stderr
    assert not findings
    assert "0 findings in 4 sampled steps of 2 ranks" in done.stderr
    assert not list(tmp_path.glob("rank*"))


@pytest.mark.parametrize(
    ("bug", "kind", "call"),
    [
        ("", "", ""),
        ("inner-norms", "sequence", "self.norm(x)"),
        ("heads", "local", "self.heads("),
        ("scatter", "backward", "self.embed("),
        ("no-gather", "sequence", "self.head("),
    ],
)
def test_a_missing_exchange_of_parts_of_the_sequence_is_found(
    tmp_path: Path, python: ForkedPython, bug: str, kind: str, call: str
) -> None:
    done, findings = guard(tmp_path, "train_sp.py", "--bug", bug, python=python)
    assert done.returncode == 0, done.stderr
    lines = enumerate((PROGRAMS / "train_sp.py").read_text().splitlines(), 1)
    used = [f"train_sp.py:{number}" for number, line in lines if call in line]
    found = [(each["facts"]["cause"]["kind"], each["sites"][0]["site"]) for each in findings]
    assert found == ([(kind, used[-1])] if bug else [])


@pytest.mark.parametrize(
    ("program", "bug", "tensor", "kind", "call"),
    [
        ("train_fsdp_tp.py", "tp-data", "embed.weight", "rows", "batch = torch.randint("),
        ("train_pp.py", "", "", "", ""),
        ("train_pp.py", "tied", "embed.weight", "", "optimizer.step()"),
        ("train_layouts.py", "broadcast --layout manual", "embed.weight", "overwrite", "optimizer.step()"),
    ],
)
def test_replicas_that_are_not_reduced_are_found_by_rows_stages_and_broadcasts(
    tmp_path: Path, python: ForkedPython, program: str, bug: str, tensor: str, kind: str, call: str
) -> None:
    done, findings = guard(tmp_path, program, "--bug", *(bug.split() or [""]), python=python)
    assert done.returncode == 0, done.stderr
    lines = enumerate((PROGRAMS / program).read_text().splitlines(), 1)
    used = [f"{program}:{number}" for number, line in lines if call in line]
    causes = [(each["facts"]["cause"] or {"kind": ""})["kind"] for each in findings]
    found = [(each["tensor"], each["sites"][0]["site"]) for each in findings]
    assert found == ([(tensor, used[0])] if bug else [])
    assert causes == ([kind] if bug else [])


def test_a_bug_is_found_without_another_run(tmp_path: Path, python: ForkedPython) -> None:
    done, findings = guard(tmp_path, "train_ep.py", "--bug", "late-zero", "--steps", "4", python=python)
    assert done.returncode == 0, done.stderr
    assert [(each["check"], each["tensor"]) for each in findings] == [("order of calls", "emptied")]


def test_a_rank_that_clips_fewer_gradients_is_found(tmp_path: Path, python: ForkedPython) -> None:
    options = ("--layout", "manual", "--bug", "rank-clip", "--steps", "4")
    done, findings = guard(tmp_path, "train_layouts.py", *options, python=python)
    assert done.returncode == 0, done.stderr
    found = {(each["check"], each["facts"]["about"]): each for each in findings}
    # Replicas that ranks clip differently drift from then on, and the norm of one rank shows the reason.
    assert found.keys() == {("replicas", "drift"), ("gradient norm", "own norm")}
    assert found["gradient norm", "own norm"]["ranks"] == [1]


def test_a_console_gets_the_ranks_where_the_finding_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: ForkedPython
) -> None:
    monkeypatch.setenv("MPDB_JOB", "guarded")
    monkeypatch.setenv("MPDB_DIR", str(tmp_path / "sockets"))
    asked = ["wait 2", "@all p 'bug is', bug", "@all c"]
    commands = [word for each in asked for word in ("-c", each)]
    with subprocess.Popen(
        [sys.executable, "-m", "multiprocessing_pdb", "guarded", *commands], stdout=subprocess.PIPE, text=True
    ) as console:
        bug = ("--bug", "zero-grad", "--steps", "4")
        done, findings = guard(tmp_path / "out", "train_ep.py", *bug, options=("--debug",), python=python)
        said, _ = console.communicate(timeout=120)
    assert done.returncode == 0, done.stderr
    assert [(each["check"], each["tensor"]) for each in findings] == [("order of calls", "discarded")]
    # The variable is one of the script's own frames, on both ranks.
    assert "ranks 0-1: ('bug is', 'zero-grad')" in said, said
    assert done.stdout.count("step ") == 4
