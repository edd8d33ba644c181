"""The place of a user's code and case in the worktree of a commit."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from moeverify.errors import CaseError
from moeverify.results.bisection import CommitJudgement
from moeverify.verification.controller.commit_judge import CommitCase, Worktree
from moeverify.verification.controller.git_history import Repository
from moeverify.verification.controller.judgement import JudgementCache

CASE = """\
recipe: small
layout: {dp_shard: 2, parallelize: "bisected.model:parallelize"}
"""
RECIPE = 'model: {factory: "bisected.model:Net", vocab_size: 8}\n'


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommitCase:
    """Return the case of a repository whose code is below `src`, which an editable install has on `sys.path`."""
    root = (tmp_path / "repository").resolve()
    for name, text in (
        ("src/bisected/__init__.py", ""),
        ("src/bisected/model.py", "class Net: ...\ndef parallelize(): ...\n"),
        ("verify/case.yaml", CASE),
        ("verify/recipes/small.yaml", RECIPE),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(root / "src")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), "/elsewhere"])}
    repository = Repository.find(root, environment)
    return CommitCase.find(Path("verify/case.yaml"), ["--timeout", "9"], root, repository)


def test_code_is_imported_from_the_worktree_only(case: CommitCase, tmp_path: Path) -> None:
    worktree = tmp_path / "tree"
    (worktree / "src" / "bisected").mkdir(parents=True)
    (worktree / "src" / "bisected" / "__init__.py").touch()
    path = Worktree(case, worktree, tmp_path / "run")._make_environment()["PYTHONPATH"].split(os.pathsep)
    assert path[0] == str(worktree / "src")
    assert not any(place.startswith(str(case.repository.root)) for place in path)
    assert case.find_missing(worktree) == ""


def test_a_commit_without_the_module_has_no_verdict(case: CommitCase, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    assert case.find_missing(tmp_path / "tree") == "bisected"
    slot = Worktree(case, tmp_path / "tree", tmp_path / "run", missing="bisected")
    found = slot.finish()
    assert (found.verdict, found.reason) == ("skipped", "this commit has no module `bisected`")


def test_options_that_no_commit_accepts_are_an_error_of_the_command(case: CommitCase, tmp_path: Path) -> None:
    def finish(log: str) -> CommitJudgement:
        (tmp_path / "log.txt").write_text(log)
        slot = Worktree(case, tmp_path / "tree", tmp_path)
        slot.process = subprocess.Popen(["false"])
        return slot.finish()

    usage = "Usage: moeverify run [OPTIONS] [[CASE]]...\n\nError: No such option: --bogus\n"
    with pytest.raises(CaseError) as caught:
        finish(usage)
    (problem,) = caught.value.problems
    assert problem.path == "CASE"
    assert problem.message.endswith("No such option: --bogus")
    assert finish("error: no module\n").reason == "no module"


def test_only_missing_parts_of_the_case_are_copied(case: CommitCase, tmp_path: Path) -> None:
    (tmp_path / "tree" / "verify").mkdir(parents=True)
    (tmp_path / "tree" / "verify" / "case.yaml").write_text("of the commit")
    assert case.complete(tmp_path / "tree") == [Path("verify/recipes/small.yaml")]
    assert (tmp_path / "tree" / "verify" / "case.yaml").read_text() == "of the commit"


def test_verdicts_are_kept_by_content(case: CommitCase, tmp_path: Path) -> None:
    cache = JudgementCache(tmp_path / "judgements.json")
    key = case.make_key("tree", cache)
    cache.keep({key: CommitJudgement(verdict="pass"), "other": CommitJudgement(verdict="error")})
    assert cache.read(key) == CommitJudgement(verdict="pass")
    assert cache.read("other") is None  # an error may be one of the machine
    assert case.make_key("another tree", cache) != key
    case.file.write_text(CASE + "# changed\n")
    assert case.make_key("tree", cache) != key
    flipped = cache.path.read_text().replace('"pass"', '"mismatch"')
    unsealed = json.dumps({key: {"verdict": "pass"}})
    for damaged in (flipped, unsealed, "{"):
        cache.path.write_text(damaged)
        assert cache.read(key) is None
