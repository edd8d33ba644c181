"""`moeverify bisect` and `moeverify shrink` on a model of the user, with ranks."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked.python import ForkedPython

from moeverify.verification.controller.commit_judge import Worktree

Invoke = Callable[..., Any]

MODEL = """\
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.head = nn.Linear(4, 8)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def parallelize(model, mesh):
    def average(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return model
"""

CASE = """\
recipe:
  model: {factory: "net:Net", vocab_size: 8}
  data: {batch: 2, seq_len: 2}
  steps: 2
layout: {dp_replicate: 2, parallelize: "net:parallelize"}
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working tree of a repository whose second commit leaves out the division."""
    root = tmp_path / "repository"
    (root / "verify").mkdir(parents=True)
    monkeypatch.chdir(root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the server that `shrink` starts serves no other test
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "ada")

    def git(*words: str) -> None:
        subprocess.run(["git", *words], check=True, capture_output=True)

    git("init", "--quiet")
    for text in (MODEL, MODEL.replace("        parameter.grad /= 2\n", "")):
        (root / "net.py").write_text(text)
        git("add", "net.py")
        git("commit", "--quiet", "--message", "one more")
    (root / "verify" / "net.yaml").write_text(CASE)
    return root


@pytest.mark.ranks
def test_the_commit_is_found_and_the_case_made_smaller(
    repository: Path, tmp_path: Path, invoke: Invoke, python: ForkedPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_command = Worktree._make_command
    monkeypatch.setattr(Worktree, "_make_command", lambda self: [*python.command(), *make_command(self)[2:]])
    (repository / "net.py").write_text(MODEL)  # the working tree is right again, and no commit
    words = ("bisect", "HEAD~1..", "--json", tmp_path / "found.json", "--", "verify/net.yaml")
    found = invoke(*words, "--explain-seconds", "0")
    assert found.exit_code == 0, found.output
    result = json.loads((tmp_path / "found.json").read_text())
    assert result["first_bad"]["hash"] == result["bad"]["hash"]
    assert result["files"] == ["M\tnet.py"]
    assert result["judgement"]["code"] == "scale"
    assert any("verify/net.yaml" in note for note in result["notes"])
    again = invoke(*words, "--explain-seconds", "0")
    assert again.exit_code == 0, again.output
    assert all(each["is_known"] for each in json.loads((tmp_path / "found.json").read_text())["judged"])
    worktrees = subprocess.run(["git", "worktree", "list"], check=True, capture_output=True).stdout
    assert worktrees.count(b"\n") == 1

    passing = invoke("shrink", "verify/net.yaml")
    assert passing.exit_code == 2
    assert "passes" in passing.output
    subprocess.run(["git", "checkout", "--quiet", "net.py"], check=True)
    small = invoke("shrink", "verify/net.yaml", "--json", tmp_path / "small.json")
    assert small.exit_code == 0, small.output
    told = json.loads((tmp_path / "small.json").read_text())
    assert told["facts"]["changes"]["recipe.model.arguments.layers"] == [2, 1]
    assert (told["facts"]["is_whole"], told["facts"]["written"]) == (True, "verify/net-small.yaml")
    assert [each["command"] for each in told["next"]] == ["moeverify run verify/net-small.yaml"]
    counted = [line.split()[0] for line in small.output.splitlines() if line.startswith("[")]
    assert counted == [
        f"[{number}]" for number in range(1, len(counted) + 1)
    ]  # of the search, not of a round
    text = (repository / "verify" / "net-small.yaml").read_text()
    assert "recipe.model.arguments.layers: 2 to 1" in text
    assert "steps: 1" in text
    assert invoke("run", "verify/net-small.yaml", "-q", "--explain-seconds", "0").exit_code == 1
