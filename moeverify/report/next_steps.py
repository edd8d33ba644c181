"""Suggested commands after a case that did not pass."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from moeverify.report.words.run import name_candidates
from moeverify.results.run import CaseResult

# Options that change the behaviour of a case; a repeated run must keep them.
_KEPT = ("--set", "--fault", "--device", "--ranks", "--timeout", "--goldens", "--cache")


@dataclass(frozen=True)
class Kept:
    """Where a run is stored, if anywhere: the folder of `--out`, or the file of `--json`."""

    folder: Path | None = None
    file: Path | None = None

    @classmethod
    def at(cls, run: Path) -> Kept:
        """Return the place of a run that was read from there."""
        return cls(folder=run) if run.is_dir() else cls(file=run)

    @property
    def run(self) -> Path | None:
        """Return the path to pass as RUN to later commands."""
        return self.folder or self.file

    @property
    def json(self) -> Path | None:
        """Return the JSON file with the complete result."""
        return self.folder / "result.json" if self.folder else self.file


NOT_KEPT = Kept()


def name_rest(case: CaseResult, kept: Kept, field: str = "`findings`") -> str:
    """Return where to find the omitted part of a case; `field` is the attribute for Python callers."""
    if kept.json is not None:
        return f"all are in {kept.json}"
    return "--out DIR or --json FILE keeps all" if case.file else f"{field} of the result has all"


def advise(case: CaseResult, command: str, kept: Kept, number: int = 1) -> list[tuple[str, str]]:
    """Return (command, purpose) pairs to try next; `number` is the number of the case's first finding."""
    select = f"{shlex.quote(case.file)} -k {shlex.quote(case.name)}"
    steps: list[tuple[str, str]] = []
    if case.verdict == "skipped":
        return steps
    if case.saver_file or case.saved_by:
        return _advise_pair(case, command, kept.folder)
    if not case.file:  # created from Python: no command repeats it
        return [("moeverify doctor", "the abilities of this machine")] if case.verdict == "error" else steps
    if kept.run is not None and case.verdict == "mismatch":
        explain = f"moeverify explain {shlex.quote(str(kept.run))} {number}"
        steps.append((explain, "the evidence of the first finding"))
    question = next((each.follow_up for each in case.findings if each.follow_up), None)
    if question is not None and not question.answer:
        changes = "".join(f" --set layout.{name}={value}" for name, value in question.layout.items())
        apart = f"moeverify run {select}{_keep_options(command, _KEPT)}{changes}"
        steps.append((apart, f"a layout that separates {name_candidates(question)}"))
    if kept.folder is None:
        place = shlex.quote(f"runs/{case.name}")
        again = f"moeverify run {select}{_keep_options(command, _KEPT)} --out {place}"
        steps.append((again, "repeat it alone and keep all results"))
    else:
        run, page = (shlex.quote(str(path)) for path in (kept.folder, kept.folder / "report.html"))
        steps.append((f"moeverify report {run} --html {page}", "all findings on a page"))
        if case.operators:
            listed = f"moeverify operators {run} --case {shlex.quote(case.name)}"
            steps.append((listed, "the operators of both sides on a page"))
        again = f"moeverify run {select}{_keep_options(command, _KEPT)}"
        steps.append((again, "repeat it alone"))
    if case.verdict == "mismatch":
        steps.append(
            (f"moeverify mesh {select}{_keep_options(command, ('--set',))}", "shards and data of each rank")
        )
    else:
        steps.append(("moeverify doctor", "the abilities of this machine"))
    return steps


def _advise_pair(case: CaseResult, command: str, folder: Path | None) -> list[tuple[str, str]]:
    """Return the command that repeats a reshard pair with only the cases it needs."""
    files = list(dict.fromkeys(file for file in (case.saver_file, case.file) if file))
    if not files:
        return []
    again = f"moeverify reshard {shlex.join(files)}{_keep_options(command, _KEPT)}"
    if folder is None:
        return [(f"{again} --out runs/reshard", "repeat it with few others and keep all results")]
    return [(again, "repeat it with few others")]


def _keep_options(command: str, names: tuple[str, ...]) -> str:
    """Return the named options of a command line with their values, each preceded by a space."""
    try:
        words = shlex.split(command)
    except ValueError:  # an unbalanced quote: the command was not written by a shell
        return ""
    kept: list[str] = []
    for position, word in enumerate(words):
        if word in names and position + 1 < len(words):
            kept += [word, words[position + 1]]
        elif word.startswith(tuple(f"{name}=" for name in names)):
            kept.append(word)
    return "".join(f" {shlex.quote(word)}" for word in kept)
