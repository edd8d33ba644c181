"""Verification of a case on commits of a repository, each in a worktree and a process of its own.

Does not import torch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import invalidate_caches
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Self

from moeverify.cases.function import find_installed, list_top_modules
from moeverify.cases.validation.load import load_valid_cases
from moeverify.errors import CaseError, FormatError, Problem
from moeverify.input_file import read_input
from moeverify.report.formats.json import read_run
from moeverify.results.bisection import CommitJudgement, JudgedCommit
from moeverify.verification.controller.git_history import Repository
from moeverify.verification.controller.judgement import JudgementCache, judge
from moeverify.verification.controller.search_path import find_package_parent, search_path

_RESULT, _LOG = "result.json", "log.txt"
_OWN = Path(__file__).resolve().parents[3]  # the folder of moeverify itself, which stays as it is
_GRACE = 30.0  # seconds in which a verification ends its ranks after SIGTERM
_MOST_REASON = 300  # characters


@dataclass(frozen=True)
class CommitCase:
    """The case to verify on each commit: its file, the options of `moeverify run`, and its place.

    `folder` is the folder in which the user started the command. `modules` are the top-level modules of the
    functions that the case names and the repository has. `sources` are the folders of the repository from
    which Python imports.
    """

    file: Path
    options: tuple[str, ...]
    folder: Path
    repository: Repository
    modules: tuple[str, ...]
    sources: tuple[Path, ...]

    @classmethod
    def find(cls, file: Path, options: Sequence[str], folder: Path, repository: Repository) -> Self:
        """Return the case of a file of the working tree.

        Raises: CaseError if there is no such file, or if it is invalid.
        """
        if not file.is_file():
            message = f"there is no case file {file}"
            raise CaseError([Problem(message, path="CASE", remedy="name one file, as for `moeverify run`")])
        case = load_valid_cases([file]).cases[0]
        modules = list_top_modules([*case.recipe.functions.values(), case.layout.parallelize])
        root = repository.root
        sources = [Path(entry) for entry in sys.path if entry and Path(entry).is_dir()]
        sources += [place for name in modules if (place := _find_folder(name)) is not None]
        inside = [
            place.resolve().relative_to(root)
            for place in sources
            if place.resolve().is_relative_to(root) and place.resolve() != _OWN
        ]
        folders = [*search_path(case), *(str(root / place) for place in inside)]
        of_repository = [name for name in modules if PathFinder.find_spec(name, folders) is not None]
        return cls(
            file.resolve(),
            tuple(options),
            folder.resolve().relative_to(root),
            repository,
            tuple(of_repository),
            tuple(dict.fromkeys(inside)),
        )

    @property
    def place(self) -> Path | None:
        """Return the path of the case file in the repository, or None if it is elsewhere."""
        root = self.repository.root
        return self.file.relative_to(root) if self.file.is_relative_to(root) else None

    def find_missing(self, worktree: Path) -> str:
        """Return a module that a commit lacks, which Python would import from elsewhere; empty if none."""
        file = self.file if self.place is None else worktree / self.place
        places = [
            find_package_parent(file),
            worktree / self.folder,
            *(worktree / each for each in self.sources),
        ]
        folders = list(map(str, places))
        invalidate_caches()
        return next((name for name in self.modules if PathFinder.find_spec(name, folders) is None), "")

    def list_parts(self) -> Iterator[Path]:
        """Yield the case file of the working tree, and the recipes beside it."""
        yield self.file
        yield from sorted((self.file.parent / "recipes").glob("*.yaml"))

    def complete(self, worktree: Path) -> list[Path]:
        """Copy the parts of the case that a commit lacks into its worktree, and return their paths."""
        copied = []
        for part in self.list_parts() if self.place is not None else ():
            place = part.relative_to(self.repository.root)
            if not (worktree / place).exists():
                (worktree / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(part, worktree / place)
                copied.append(place)
        return copied

    def make_key(self, tree: str, cache: JudgementCache) -> str:
        """Return the key of the verdict on a commit with this tree."""
        parts = [[part.name, hashlib.sha256(read_input(part)).hexdigest()] for part in self.list_parts()]
        place = str(self.place or self.file)
        return cache.make_key(["bisect", tree, place, str(self.folder), parts, self.options])


def _find_folder(name: str) -> Path | None:
    """Return the folder from which this Python would import a top-level module."""
    spec = find_installed(name)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    origin = spec.origin if spec is not None else None
    return Path(places[0]).parent if places else Path(origin).parent if origin is not None else None


@dataclass
class Worktree:
    """A worktree in which one commit at a time is verified; `scratch` has its log and its result."""

    case: CommitCase
    worktree: Path
    scratch: Path
    cache: Path | None = None
    copied: list[Path] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    missing: str = ""

    def start(self, commit: str) -> None:
        """Check a commit out, and start `moeverify run` on it."""
        git = self.case.repository.run
        git("checkout", "--quiet", "--detach", "--force", commit, folder=self.worktree)
        git("clean", "-ffdxq", folder=self.worktree)
        self.copied = self.case.complete(self.worktree)
        self.missing = self.case.find_missing(self.worktree)
        if self.missing:
            return
        self.scratch.mkdir(exist_ok=True)
        (self.scratch / _RESULT).unlink(missing_ok=True)
        folder = self.worktree / self.case.folder
        folder.mkdir(parents=True, exist_ok=True)
        with (self.scratch / _LOG).open("wb") as log:
            self.process = subprocess.Popen(
                self._make_command(),
                cwd=folder,
                env=self._make_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def finish(self) -> CommitJudgement:
        """Wait for the end of the verification, and return its judgement.

        Raises: CaseError when CASE selects several cases, or `moeverify run` refuses its options.
        """
        if self.process is None:
            return CommitJudgement(verdict="skipped", reason=f"this commit has no module `{self.missing}`")
        code = self.process.wait()
        self.process = None
        try:
            run = read_run(self.scratch / _RESULT)
        except FormatError:
            self._check_usage()
            return CommitJudgement(verdict="skipped", reason=self._find_reason(code))
        if len(run.cases) != 1:
            names = ", ".join(case.name for case in run.cases)
            remedy = "name one, or select one by -k after `--`"
            raise CaseError([Problem(f"these are several cases: {names}", path="CASE", remedy=remedy)])
        return judge(run.cases[0]).model_copy(update={"seconds": round(run.seconds, 1)})

    def stop(self) -> None:
        """End a verification that still runs; it ends its ranks and removes its files."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _make_command(self) -> list[str]:
        place = self.case.place
        file = self.case.file if place is None else self.worktree / place
        # Goldens in git belong to the code of one commit; the layout is compared with one device as it is there.
        own = ["--goldens", str(self.scratch / "goldens"), "--no-require-goldens", "--no-github", "--quiet"]
        cache = [] if self.cache is None else ["--cache", str(self.cache)]
        result = ["--json", str(self.scratch / _RESULT)]
        command = [
            sys.executable,
            "-P",
            "-m",
            "moeverify",
            "run",
            _shorten(file, self.worktree / self.case.folder),
        ]
        return [*command, *cache, *self.case.options, *own, *result]

    def _make_environment(self) -> dict[str, str]:
        """Return the environment of a verification, with the import path moved into the worktree."""
        environment = dict(self.case.repository.environment)
        root = self.case.repository.root
        moved = [self.worktree / place for place in self.case.sources]
        given = [Path(entry) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
        kept = [
            place for place in given if not place.resolve().is_relative_to(root) or place.resolve() == _OWN
        ]
        path = [str(place) for place in (*moved, *kept, _OWN) if place.is_dir()]
        return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}

    def _check_usage(self) -> None:
        """Raises: CaseError if `moeverify run` refuses its options, which it does on every commit."""
        lines = self._read_log()
        if lines and lines[0].startswith("Usage: "):
            said = lines[-1].removeprefix("Error: ")[:_MOST_REASON]
            message = f"`moeverify run` refuses the options after `--`: {said}"
            raise CaseError(
                [Problem(message, path="CASE", remedy="`moeverify run --help` lists its options")]
            )

    def _read_log(self) -> list[str]:
        text = read_input(self.scratch / _LOG).decode(errors="replace")
        return [line.strip() for line in text.splitlines() if line.strip()]

    def _find_reason(self, code: int) -> str:
        lines = self._read_log()
        reason = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "")
        reason = reason.replace(f"{self.worktree}{os.sep}", "")
        return reason.removeprefix("error: ")[:_MOST_REASON] or f"moeverify ended with code {code}"


def _shorten(file: Path, folder: Path) -> str:
    """Return a file's path relative to the folder of the command where possible, as a user writes it."""
    return str(file.relative_to(folder)) if file.is_relative_to(folder) else str(file)


@dataclass
class CommitJudge:
    """The judge of commits, with one worktree for each commit that is judged at a time.

    `notes` lists the commits for which a part of the case came from the working tree.
    """

    case: CommitCase
    cache: JudgementCache
    slots: Sequence[Worktree]
    notes: list[str] = field(default_factory=list)
    _lacking: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def open(cls, case: CommitCase, cache: JudgementCache, scratch: Path, num_jobs: int) -> Iterator[Self]:
        """Yield a judge with worktrees in a scratch folder, and remove them afterwards."""
        with ExitStack() as stack:
            slots = []
            for number in range(num_jobs):
                worktree = scratch / f"tree{number}"
                stack.enter_context(case.repository.worktree(worktree, checkout=False))
                own = scratch / f"run{number}"
                # Two commits may have different models of one name.
                slot = Worktree(case, worktree, own, own / "cache" if num_jobs > 1 else None)
                stack.callback(slot.stop)
                slots.append(slot)
            yield cls(case, cache, slots)

    def __call__(self, commits: Sequence[str]) -> Mapping[str, JudgedCommit]:
        """Return the judgement of each commit, at most one for each worktree."""
        keys = {
            each: self.case.make_key(self.case.repository.read_tree(each), self.cache) for each in commits
        }
        known = {each: found for each, key in keys.items() if (found := self.cache.read(key)) is not None}
        running = dict(zip([each for each in commits if each not in known], self.slots, strict=False))
        for commit, slot in running.items():
            slot.start(commit)
        fresh = {commit: slot.finish() for commit, slot in running.items()}
        self.cache.keep({keys[commit]: found for commit, found in fresh.items()})
        for commit, slot in running.items():
            if slot.copied:
                names = ", ".join(map(str, slot.copied))
                self._lacking.setdefault(names, []).append(commit[:10])
        describe = self.case.repository.describe
        return {
            each: JudgedCommit(
                commit=describe(each),
                judgement=known[each] if each in known else fresh[each],
                is_known=each in known,
            )
            for each in (*known, *fresh)
        }

    def list_notes(self) -> Iterator[str]:
        """Yield a note for each part of the case that some commits lack."""
        for names, commits in self._lacking.items():
            yield f"{names}: of the working tree, since {', '.join(commits)} has none"
