"""GitHub annotations: workflow commands that attach a failure to its line of a case file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from moeverify.cases.document import read_document
from moeverify.errors import Problem
from moeverify.report.failure import describe_failure, name_failure
from moeverify.report.numbers import format_count
from moeverify.report.sanitize import clean
from moeverify.results.run import RunResult

# GitHub shows ten annotations per step and drops the others silently.
_MOST = 10


def annotate_run(run: RunResult, root: Path | None = None) -> Iterator[str]:
    """Yield a workflow command for each failed case, then for undecided ones; paths are made relative to `root`."""
    failed = [case for case in run.cases if case.has_failed]
    for number, case in enumerate(failed[:_MOST], start=1):
        lines = [name_failure(case), *(f"{label}: {text}" for label, text in describe_failure(case))]
        if number == _MOST and len(failed) > _MOST:
            lines.append(f"and {format_count(len(failed) - _MOST, 'more case')} failed")
        # No line is known if the file is gone, or if the case did not come from a file.
        tree = read_document(Path(case.file), lambda problem: None) if case.file else None
        line = tree.find_line(case.reason) if tree is not None else None
        yield _format("\n".join(lines), f"moeverify: {case.name} {case.verdict}", case.file, line, root)
    for case in [case for case in run.cases if case.verdict == "undecided"][: max(0, _MOST - len(failed))]:
        level = "warning" if run.allows_undecided else "error"
        yield _format(case.reason, f"moeverify: {case.name} undecided", case.file, None, root, level)


def annotate_problems(problems: Iterable[Problem], root: Path | None = None) -> Iterator[str]:
    """Yield a workflow command for each problem in the user's input."""
    for problem in list(problems)[:_MOST]:
        text = ": ".join(part for part in (problem.path, problem.message) if part)
        text += f"; {problem.remedy}" if problem.remedy else ""
        yield _format(text, "moeverify: bad case", problem.file, problem.line, root)


def _format(
    text: str, title: str, file: str, line: int | None, root: Path | None, level: str = "error"
) -> str:
    properties = {"title": title}
    if file:
        properties = {"file": _relate(file, root), **({"line": str(line)} if line else {}), **properties}
    listed = ",".join(f"{name}={_escape_property(value)}" for name, value in properties.items())
    return f"::{level} {listed}::{_escape(text)}"


def _relate(file: str, root: Path | None) -> str:
    """Return the path relative to `root`, or unchanged if it is outside."""
    path = Path(file).resolve()
    return (
        path.relative_to(root.resolve()).as_posix() if root and path.is_relative_to(root.resolve()) else file
    )


def _escape(text: str) -> str:
    """Return the text escaped as `@actions/core` does, on one line: it cannot start another command."""
    return clean(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
