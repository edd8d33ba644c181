"""The search for a bad commit in real repositories, with a judge that knows the answer."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from moeverify.errors import CaseError
from moeverify.results.bisection import Bisection, CommitJudgement, JudgedCommit
from moeverify.results.finding import Verdict
from moeverify.verification.controller.bisect import CommitSearch
from moeverify.verification.controller.git_history import Repository

pytestmark = pytest.mark.slow

_NUM_COMMITS = 20
_AUTHOR = {
    **{
        f"GIT_{who}_{what}": "ada@example.org"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    },
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}

Rule = Callable[[str], Verdict]


class History:
    """A repository, and a judge of its commits by their subjects."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[str] = []
        self.batches: list[int] = []
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *words: str) -> str:
        environment = {**os.environ, **_AUTHOR}
        done = subprocess.run(
            ["git", *words], cwd=self.root, env=environment, capture_output=True, check=True
        )
        return done.stdout.decode().strip()

    def commit(self, subject: str, *parents: str) -> str:
        """Make a commit of the empty tree, and return its hash."""
        tree = self.git("hash-object", "-t", "tree", "-w", os.devnull)
        options = [word for parent in parents for word in ("-p", parent)]
        return self.git("commit-tree", tree, *options, "-m", subject)

    def line(self, subjects: Sequence[str], start: str = "") -> list[str]:
        """Make commits one after another, put `main` on the last one, and return their hashes."""
        made = [start] if start else []
        for subject in subjects:
            made.append(self.commit(subject, *made[-1:]))
        self.git("reset", "--quiet", "--hard", made[-1])
        return made[1:] if start else made

    def find(self, rule: Rule, good: str, bad: str, num_jobs: int = 1) -> Bisection:
        repository = Repository.find(self.root, os.environ)

        def judge(commits: Sequence[str]) -> Mapping[str, JudgedCommit]:
            self.batches.append(len(commits))
            found = {}
            for each in commits:
                commit = repository.describe(each)
                self.asked.append(commit.subject)
                judgement = CommitJudgement(verdict=rule(commit.subject), reason="no module")
                found[each] = JudgedCommit(commit=commit, judgement=judgement)
            return found

        scratch = self.root.parent / "moeverify-scratch"
        scratch.mkdir(exist_ok=True)
        with repository.worktree(scratch / "state", checkout=False) as folder:
            search = CommitSearch(repository, folder, judge, lambda event: None, num_jobs)
            return search.find(repository.resolve(good), repository.resolve(bad))


@pytest.fixture
def history(tmp_path: Path) -> History:
    root = tmp_path / "repository"
    root.mkdir()
    return History(root)


def since(first: int, *skipped: int) -> Rule:
    """Return the verdicts of numbered commits of which those from `first` on fail."""

    def rule(subject: str) -> Verdict:
        number = int(subject)
        return "skipped" if number in skipped else "mismatch" if number >= first else "pass"

    return rule


@pytest.mark.parametrize("num_jobs", [1, 3])
def test_any_planted_commit_is_found(history: History, num_jobs: int) -> None:
    commits = history.line([str(number) for number in range(_NUM_COMMITS)])
    for planted in (1, 8, 19):
        history.asked.clear()
        result = history.find(since(planted), commits[0], "main", num_jobs)
        assert result.first_bad is not None
        assert result.first_bad.hash == commits[planted]
        assert len(set(history.asked)) == len(history.asked), "a commit was judged twice"
        assert num_jobs > 1 or len(history.asked) <= 2 + 5
    assert max(history.batches) <= num_jobs
    assert num_jobs == 1 or 3 in history.batches
    assert history.git("worktree", "list").count("\n") == 0
    assert history.git("for-each-ref", "refs/bisect") == ""


def test_skipped_commits_are_passed_over_or_named(history: History) -> None:
    commits = history.line([str(number) for number in range(10)])
    passed_over = history.find(since(7, 3, 4, 5), commits[0], "main")
    assert passed_over.first_bad is not None
    assert passed_over.first_bad.subject == "7"
    named = history.find(since(7, 5, 6, 7), commits[0], "main")
    assert named.outcome == "skipped"
    assert {commit.subject for commit in named.candidates} == {"5", "6", "7", "8"}


def test_another_failure_than_that_of_the_bad_end_is_skipped(history: History) -> None:
    commits = history.line([str(number) for number in range(8)])
    rule = since(6)
    result = history.find(lambda each: "error" if each == "3" else rule(each), commits[0], "main")
    assert result.first_bad is not None
    assert result.first_bad.subject == "6"


def test_a_bug_that_a_merge_brought_is_found_on_its_branch(history: History) -> None:
    base, *_, main = history.line(["0", "1", "2", "3"])
    branch = history.line(["13", "14", "15"], base)
    merge = history.commit("20", main, branch[-1])
    result = history.find(since(14), base, merge)
    assert result.first_bad is not None
    assert result.first_bad.subject == "14"


def test_a_fix_of_an_older_bug_is_refused(history: History) -> None:
    base, *_, fixed = history.line(["9", "1", "2"])
    branch = history.line(["12", "13"], base)
    with pytest.raises(CaseError, match="merge base"):
        history.find(since(9), fixed, branch[-1])


@pytest.mark.parametrize(
    ("first", "good", "bad", "message"),
    [
        (9, "main~3", "main", "passes on BAD"),
        (0, "main~3", "main", "fails on GOOD"),
        (2, "main", "main~3", "BAD is not after GOOD"),
        (2, "main", "main", "BAD is not after GOOD"),
        (2, "main~9", "main", "no commit `main~9`"),
        (2, "--all", "main", "no commit `--all`"),
    ],
)
def test_wrong_ends_are_named(history: History, first: int, good: str, bad: str, message: str) -> None:
    history.line([str(number) for number in range(4)])
    with pytest.raises(CaseError, match=message):
        history.find(since(first), good, bad)
    assert history.git("worktree", "list").count("\n") == 0


def test_an_end_without_a_verdict_is_named(history: History) -> None:
    history.line([str(number) for number in range(4)])
    with pytest.raises(CaseError, match=r"GOOD, .* cannot be judged: no module"):
        history.find(since(2, 0), "main~3", "main")


def test_a_bisection_of_the_user_stays(history: History) -> None:
    commits = history.line([str(number) for number in range(8)])
    history.git("bisect", "start", commits[-1], commits[0])
    before = history.git("bisect", "log")
    history.find(since(3), commits[0], commits[-1])
    assert history.git("bisect", "log") == before


def test_worktrees_of_a_killed_command_are_forgotten(history: History) -> None:
    history.line(["0", "1"])
    lost = history.root.parent / "moeverify-lost" / "state"
    history.git("worktree", "add", "--detach", "--no-checkout", str(lost))
    subprocess.run(["rm", "-r", str(lost.parent)], check=True)
    history.find(since(1), "main~1", "main")
    assert history.git("worktree", "list").count("\n") == 0


def test_a_folder_outside_of_git_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="no working tree of git"):
        Repository.find(tmp_path, {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)})
    with pytest.raises(CaseError, match="no `git` on PATH"):
        Repository.find(tmp_path, {"PATH": str(tmp_path)})
