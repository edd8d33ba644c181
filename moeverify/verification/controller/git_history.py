"""Commits of a user's repository, and git's own search over them in worktrees of a scratch folder.

Linked worktrees have their own HEAD and their own `refs/bisect`, so that neither the user's files nor a
bisection of the user are touched.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moeverify.errors import CaseError, Problem
from moeverify.input_file import read_input
from moeverify.results.bisection import Commit
from moeverify.verification.controller.scratch import PREFIX

_RANGE = "GOOD..BAD"
_FIRST = re.compile(r"^# first bad commit: \[([0-9a-f]+)\]", re.MULTILINE)
_SKIPPED = "# only skipped commits left to test"
_CANDIDATE = re.compile(r"^# possible first bad commit: \[([0-9a-f]+)\]", re.MULTILINE)
_STEPS = re.compile(r"bisect_steps=(\d+)")
_NUMBER = re.compile(r"bisect_all=(\d+)")
# A git hook sets these variables, which point every git command at one repository.
_FOREIGN = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_PREFIX",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
)
_LIMIT = 600.0  # seconds for one git command


@dataclass(frozen=True)
class Repository:
    """A git repository with the folder of its working tree, and the environment of git commands."""

    root: Path
    environment: Mapping[str, str]

    @classmethod
    def find(cls, folder: Path, environment: Mapping[str, str]) -> Repository:
        """Return the repository around a folder.

        Raises: CaseError if git is missing, or if the folder is in no working tree.
        """
        clean = {name: value for name, value in environment.items() if name not in _FOREIGN}
        try:
            top = _run_git(("rev-parse", "--show-toplevel"), folder, clean)
        except FileNotFoundError:
            raise CaseError([Problem("there is no `git` on PATH", remedy="install git")]) from None
        if top.returncode:
            reason = _find_message(top)
            message = f"{folder} is in no working tree of git: {reason}"
            raise CaseError([Problem(message, remedy="start the command in your repository")])
        return cls(Path(top.stdout.rstrip("\n")), clean)

    def run(self, *words: str, folder: Path | None = None) -> str:
        """Return the output of a git command in the root or another folder.

        Raises: CaseError with the message of git if it fails.
        """
        done = _run_git(words, folder or self.root, self.environment)
        if done.returncode:
            raise CaseError([Problem(f"`git {' '.join(words)}` failed: {_find_message(done)}")])
        return done.stdout

    def resolve(self, revision: str) -> str:
        """Return the hash of the commit that a revision names.

        Raises: CaseError if there is no such commit.
        """
        words = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        done = _run_git(words, self.root, self.environment)
        if done.returncode:
            shallow = self.run("rev-parse", "--is-shallow-repository").strip() == "true"
            remedy = (
                "`git fetch --unshallow` gets the whole history" if shallow else "`git log` lists commits"
            )
            raise CaseError([Problem(f"there is no commit `{revision}`", path=_RANGE, remedy=remedy)])
        return done.stdout.strip()

    def is_ancestor(self, first: str, second: str) -> bool:
        """Return whether one commit is an ancestor of another, or the same."""
        words = ("merge-base", "--is-ancestor", first, second)
        return _run_git(words, self.root, self.environment).returncode == 0

    def describe(self, commit: str) -> Commit:
        """Return the hash, author, date and subject of a commit."""
        text = self.run(
            "show", "--no-patch", "--no-show-signature", "--format=%H%x00%aI%x00%an%x00%s", commit
        )
        digest, date, author, subject = text.rstrip("\n").split("\0", 3)
        return Commit(hash=digest, date=date, author=author, subject=subject)

    def read_tree(self, commit: str) -> str:
        """Return the hash of the content of a commit."""
        return self.run("rev-parse", f"{commit}^{{tree}}").strip()

    def list_changes(self, commit: str) -> tuple[str, ...]:
        """Return the files that a commit changed against its first parent, as `M<tab>path`."""
        parents = self.run("rev-list", "--parents", "-n", "1", commit).split()[1:]
        sides = [parents[0], commit] if parents else ["--root", commit]
        text = self.run("diff-tree", "-r", "--no-commit-id", "--name-status", *sides)
        return tuple(text.splitlines())

    def is_dirty(self) -> bool:
        """Return whether tracked files have changes that are in no commit."""
        return bool(self.run("status", "--porcelain", "--untracked-files=no").strip())

    @contextmanager
    def worktree(self, folder: Path, *, checkout: bool) -> Iterator[Path]:
        """Yield a linked worktree at HEAD, with or without files, and remove it afterwards.

        Also removes the entries of worktrees whose folders a killed command has left without.
        """
        self._remove_lost()
        options = () if checkout else ("--no-checkout",)
        self.run("worktree", "add", "--quiet", "--detach", *options, str(folder), "HEAD")
        try:
            yield folder
        finally:
            self._remove(folder)

    def _remove_lost(self) -> None:
        """Remove the entries of earlier scratch folders that are gone."""
        for line in self.run("worktree", "list", "--porcelain").splitlines():
            place = Path(line.removeprefix("worktree "))
            if line.startswith("worktree ") and place.parent.name.startswith(PREFIX) and not place.exists():
                self._remove(place)

    def _remove(self, place: Path) -> None:
        words = ("worktree", "remove", "--force", "--force", str(place))
        _run_git(words, self.root, self.environment)


@dataclass(frozen=True)
class GitBisection:
    """A search of `git bisect` in a linked worktree without files. git handles skips and merges."""

    repository: Repository
    folder: Path

    def start(self, good: str, bad: str) -> None:
        """Start the search. Raises: CaseError if git refuses it."""
        self._run("start", "--no-checkout", bad, good)

    def mark(self, term: str, commit: str) -> None:
        """Mark a commit as `good`, `bad` or `skip`.

        Raises: CaseError if git cannot go on, for example because a merge base is bad.
        """
        done = _run_git(("bisect", term, commit), self.folder, self.repository.environment)
        if done.returncode and not self.first_bad and not self.candidates:
            raise CaseError([Problem(f"git cannot go on: {_find_message(done)}", path=_RANGE)])

    @property
    def next(self) -> str:
        """Return the commit to judge next."""
        return self.repository.run("rev-parse", "BISECT_HEAD", folder=self.folder).strip()

    @property
    def first_bad(self) -> str:
        """Return the first bad commit; empty while the search goes on."""
        found = _FIRST.search(self._read_log())
        return found[1] if found is not None else ""

    @property
    def candidates(self) -> tuple[str, ...]:
        """Return the candidates for the first bad commit, if only skipped commits are left to judge."""
        log = self._read_log()
        return tuple(_CANDIDATE.findall(log)) if _SKIPPED in log else ()

    def estimate(self) -> tuple[int, int]:
        """Return the number of commits that may be the first bad one, and of steps left."""
        bad, goods = self._read_refs()
        text = self.repository.run("rev-list", "--bisect-vars", bad, "--not", *goods, folder=self.folder)
        steps, number = _STEPS.search(text), _NUMBER.search(text)
        return int(number[1]) if number else 0, int(steps[1]) + 1 if steps else 0

    def look_ahead(self, most: int) -> list[str]:
        """Return the next commit, and those that follow it after a good and after a bad verdict."""
        bad, goods = self._read_refs()
        picked = [self.next]
        sides = [(bad, [*goods, picked[0]]), (picked[0], goods)]
        while sides and len(picked) < most:
            worse, better = sides.pop(0)
            words = ("rev-list", "--bisect", worse, "--not", *better)
            middle = self.repository.run(*words, folder=self.folder).strip()
            if not middle or middle == worse:
                continue
            if middle not in picked:
                picked.append(middle)
            sides += [(worse, [*better, middle]), (middle, better)]
        return picked

    def _run(self, *words: str) -> str:
        return self.repository.run("bisect", *words, folder=self.folder)

    def _read_refs(self) -> tuple[str, list[str]]:
        words = ("for-each-ref", "--format=%(objectname) %(refname)", "refs/bisect")
        lines = [line.split() for line in self.repository.run(*words, folder=self.folder).splitlines()]
        goods = [digest for digest, name in lines if name.startswith("refs/bisect/good-")]
        return next(digest for digest, name in lines if name == "refs/bisect/bad"), goods

    def _read_log(self) -> str:
        path = self.repository.run("rev-parse", "--git-path", "BISECT_LOG", folder=self.folder).strip()
        return read_input(self.folder / path).decode(errors="replace")


def _run_git(
    words: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    # Hooks of the user are for the user's own work in the repository.
    command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false", *words]
    return subprocess.run(
        command,
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_LIMIT,
        check=False,
    )


def _find_message(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return " ".join(lines).removeprefix("fatal: ").removeprefix("error: ") or f"code {done.returncode}"
