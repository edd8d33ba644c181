"""GitHub output of a run: annotations in the log, and the job summary."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from moeverify.errors import MoeverifyError
    from moeverify.results.run import RunResult


def is_github() -> bool:
    """Return whether this process runs in a GitHub workflow."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def publish_run(run: RunResult, console: Console) -> str:
    """Print annotations and append to the job summary, if any; return the reason for a failure."""
    from moeverify.report.formats.markdown import format_markdown
    from moeverify.report.github import annotate_run

    for line in annotate_run(run, _find_root()):
        console.print(line, soft_wrap=True)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(format_markdown(run))
        except OSError as error:
            return f"the job summary {summary} was not written: {error.strerror or error}"
    return ""


def publish_error(error: MoeverifyError, console: Console) -> None:
    """Print an annotation for each problem of invalid cases, if on GitHub."""
    from moeverify.errors import CaseError
    from moeverify.report.github import annotate_problems

    if is_github() and isinstance(error, CaseError):
        for line in annotate_problems(error.problems, _find_root()):
            console.print(line, soft_wrap=True)


def _find_root() -> Path | None:
    workspace = os.environ.get("GITHUB_WORKSPACE")
    return Path(workspace) if workspace else None
