"""`moeverify init` on a model that moeverify has never seen, and the commands for agents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moeverify
from moeverify.report.codes import MECHANISMS
from moeverify.results.cause import Cause

Invoke = Callable[..., Any]


MODEL = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, vocab=4096, width=256):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))
"""


@pytest.mark.ranks
def test_a_new_model_gets_cases_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    (tmp_path / "theirs.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = invoke("init", "theirs:Net", "--json", tmp_path / "told.json")
    assert done.exit_code == 0, done.output
    assert "2 cases: 2 pass" in done.output
    facts = json.loads((tmp_path / "told.json").read_text())["facts"]
    assert [(each["name"], each["verdict"]) for each in facts["layouts"]] == [
        ("ddp", "pass"),
        ("fsdp2", "pass"),
    ]
    files = {
        str(path.relative_to(tmp_path))
        for path in tmp_path.rglob("*")
        if path.suffix in (".yaml", ".yml", ".py")
    }
    assert files == {"theirs.py", *(each["path"] for each in facts["files"])}
    assert files == {
        "theirs.py",
        "verify/net-ddp.yaml",
        "verify/net-fsdp2.yaml",
        "verify/recipes/net.yaml",
        "tests/test_layouts.py",
        ".github/workflows/moeverify.yml",
    }
    assert invoke("check", "verify").exit_code == 0


def test_a_refusal_is_one_sentence_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.py").write_text(MODEL)
    for words in (("theirs:Nett",), ("nowhere:make",), ("theirs:Net", "--folder", "/tmp/elsewhere")):
        done = invoke("init", *words)
        assert (done.exit_code, done.stdout) == (2, "")
        problem, remedy = [line for line in done.stderr.splitlines() if not line.startswith("trying")]
        assert problem.startswith("error: ")
        assert remedy.startswith("    ")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs.py"]


def test_a_value_that_is_no_yaml_is_named(invoke: Invoke) -> None:
    done = invoke("init", "theirs:Net", "--arg", "width=8", "--arg", "depth=[")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: --arg depth: ")


def test_errors_name_the_argument_as_the_usage_does(invoke: Invoke) -> None:
    assert "error: PKG.MOD:NAME: " in invoke("init", "theirs").stderr
    assert "PKG.MOD:NAME" in invoke("init", "--help").stdout


def test_a_place_that_cannot_be_written_is_refused_before_the_model_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.py").write_text("raise SystemExit('it was tried')")
    (tmp_path / "tests").touch()
    done = invoke("init", "theirs:Net", "--arg", "width=8")
    assert done.exit_code == 2
    assert f"cannot write {tmp_path}/tests: {tmp_path}/tests is no folder" in done.stderr
    assert "tried" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tests", "theirs.py"]


@pytest.mark.parametrize("code", [*Cause, *MECHANISMS])
def test_each_code_has_a_page(code: str, invoke: Invoke) -> None:
    done = invoke("explain", code)
    assert done.exit_code == 0
    assert done.stdout.startswith(f"{code}")
    assert len(done.stdout.split()) > 4


def test_an_unknown_code_gets_the_nearest_one_and_the_way_to_a_run(invoke: Invoke) -> None:
    done = invoke("explain", "missing-reductoin")
    assert done.exit_code == 2
    assert "no run and no code" in done.stderr
    assert "`missing-reduction`" in done.stderr
    assert "--out" in done.stderr


def test_the_skill_is_printed_as_it_is(invoke: Invoke) -> None:
    page = Path(moeverify.__file__).parent / "cli" / "SKILL.md"
    assert invoke("skill").stdout == page.read_text()
