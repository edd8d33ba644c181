"""The next command to type after a case that did not pass."""

from __future__ import annotations

import shlex
from pathlib import Path

from moeverify.compare.result import CaseResult

# Options of the run that change what the case does, so that a repeat must keep them.
_KEPT = ("--set", "--fault", "--device", "--ranks", "--timeout", "--goldens", "--cache")


def advise(case: CaseResult, command: str, folder: Path | None) -> list[tuple[str, str]]:
    """Return (command, purpose) pairs; `folder` is where this run was kept, if it was."""
    select = f"{shlex.quote(case.file)} -k {shlex.quote(case.name)}"
    steps: list[tuple[str, str]] = []
    if case.verdict == "skipped":
        return steps
    if not case.file:  # it came from Python: there is no command that repeats it
        return [("moeverify doctor", "what this machine can do")] if case.verdict == "error" else steps
    if folder is None:
        kept = shlex.quote(f"runs/{case.name}")
        again = f"moeverify run {select}{_keep_options(command, _KEPT)} --out {kept}"
        steps.append((again, "repeat it alone and keep all of it"))
    else:
        page = shlex.quote(str(folder / "report.html"))
        steps.append((f"moeverify report {shlex.quote(str(folder))} --html {page}", "all findings on a page"))
        again = f"moeverify run {select}{_keep_options(command, _KEPT)}"
        steps.append((again, "repeat it alone"))
    if case.verdict == "mismatch":
        steps.append(
            (f"moeverify mesh {select}{_keep_options(command, ('--set',))}", "which rank holds what")
        )
    else:
        steps.append(("moeverify doctor", "what this machine can do"))
    return steps


def _keep_options(command: str, names: tuple[str, ...]) -> str:
    """Return the named options of a command line with their values, each with a space before it."""
    try:
        words = shlex.split(command)
    except ValueError:  # a quote without its end: the command was not written by a shell
        return ""
    kept: list[str] = []
    for position, word in enumerate(words):
        if word in names and position + 1 < len(words):
            kept += [word, words[position + 1]]
        elif word.startswith(tuple(f"{name}=" for name in names)):
            kept.append(word)
    return "".join(f" {shlex.quote(word)}" for word in kept)
