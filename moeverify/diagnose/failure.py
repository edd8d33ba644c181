"""A diagnosis that fails: the verdict stays, and a note says what was raised and where."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from moeverify.results.finding import Finding, note_failure
from moeverify.results.observation import DiagnosisFailed


def keep_verdict(findings: Sequence[Finding], explain: Callable[[], list[Finding]]) -> list[Finding]:
    """Return what `explain` returns, and the findings as they are where it raises: a verdict needs no cause.

    The first finding then carries what was raised and where.
    """
    try:
        return explain()
    except Exception as error:  # whatever it is: checks and findings are right without it
        return note_failure(findings, describe_failure(error))


def describe_failure(error: BaseException) -> DiagnosisFailed:
    """Return what was raised and where: the innermost frame of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    site = f"{_shorten(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return DiagnosisFailed(error=type(error).__name__, message=str(error), site=site)


def _shorten(path: str) -> str:
    """Return a path from our package on, or else its name."""
    parts = Path(path).parts
    package = __name__.partition(".")[0]
    begin = len(parts) - 1 - parts[::-1].index(package) if package in parts else len(parts) - 1
    return "/".join(parts[begin:])
