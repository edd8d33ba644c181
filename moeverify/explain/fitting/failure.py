"""Failures of the diagnosis: the verdict stays, and a note says which error was raised and where."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from moeverify.results.finding import Finding, note_failure
from moeverify.results.observation import DiagnosisFailed


def keep_verdict(findings: Sequence[Finding], explain: Callable[[], list[Finding]]) -> list[Finding]:
    """Return the findings of `explain`, or `findings` if it raises: a verdict does not need a cause.

    If it raises, the first finding notes the error and its place.
    """
    try:
        return explain()
    except Exception as error:  # checks and findings are valid whatever is raised
        return note_failure(findings, describe_failure(error))


def describe_failure(error: BaseException) -> DiagnosisFailed:
    """Return the error and its place: the innermost frame of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    site = f"{_shorten(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return DiagnosisFailed(error=type(error).__name__, message=str(error), site=site)


def _shorten(path: str) -> str:
    """Return a path relative to this package, or the file name outside of it."""
    parts = Path(path).parts
    package = __name__.partition(".")[0]
    begin = len(parts) - 1 - parts[::-1].index(package) if package in parts else len(parts) - 1
    return "/".join(parts[begin:])
