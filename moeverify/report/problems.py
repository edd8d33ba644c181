"""Console output of an error: each problem on its own line, the remedy below it."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.text import Text

from moeverify.errors import MOST_PROBLEMS, CaseError, MoeverifyError, Problem
from moeverify.report.console import print_lines
from moeverify.report.numbers import format_count
from moeverify.report.sanitize import MOST_TEXT, clean, elide


def render_error(error: MoeverifyError, console: Console) -> None:
    """Print an error without traceback; each problem as `file:line: path: message`, its remedy below."""
    if not isinstance(error, CaseError):
        print_lines(console, Text.assemble(("error: ", "bold red"), clean(str(error))))
        return
    listed: Counter[str] = Counter()
    for problem in error.problems:
        listed[problem.file] += 1
        if listed[problem.file] <= MOST_PROBLEMS:
            _render_problem(problem, console)
    for file, number in listed.items():
        if number > MOST_PROBLEMS:
            more = f"and {number - MOST_PROBLEMS} more problems of {file or 'the command'}"
            print_lines(console, Text(_shorten(more)))
    if len(error.problems) > 1:
        print_lines(console, Text(format_count(len(error.problems), "problem"), style="bold red"))


def _render_problem(problem: Problem, console: Console) -> None:
    """Print one problem; the location comes first and unbroken, so that editors can jump to it."""
    line = Text()
    if problem.file:
        place = problem.file + (f":{problem.line}" if problem.line is not None else "")
        line.append(f"{_shorten(place)}: ", style="bold")
    else:
        line.append("error: ", style="bold red")
    if problem.path:
        line.append(f"{_shorten(problem.path)}: ", style="cyan")
    line.append(_shorten(problem.message))
    print_lines(console, line)
    if problem.remedy:
        print_lines(console, Text.assemble("    ", (_shorten(problem.remedy), "green")))


def _shorten(text: str) -> str:
    """Return a text of the user for a message, without its middle if it is very long."""
    return elide(clean(text), MOST_TEXT)
