"""Console output of an error: each problem on its own line, the remedy below it."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from moeverify.errors import CaseError, MoeverifyError, Problem
from moeverify.report.console import print_lines
from moeverify.report.numbers import format_count
from moeverify.report.sanitize import clean


def render_error(error: MoeverifyError, console: Console) -> None:
    """Print an error without traceback; each problem as `file:line: path: message`, its remedy below."""
    if not isinstance(error, CaseError):
        print_lines(console, Text.assemble(("error: ", "bold red"), clean(str(error))))
        return
    for problem in error.problems:
        _render_problem(problem, console)
    if len(error.problems) > 1:
        print_lines(console, Text(format_count(len(error.problems), "problem"), style="bold red"))


def _render_problem(problem: Problem, console: Console) -> None:
    """Print one problem; the location comes first and unbroken, so that editors can jump to it."""
    line = Text()
    if problem.file:
        place = problem.file + (f":{problem.line}" if problem.line is not None else "")
        line.append(f"{clean(place)}: ", style="bold")
    else:
        line.append("error: ", style="bold red")
    if problem.path:
        line.append(f"{clean(problem.path)}: ", style="cyan")
    line.append(clean(problem.message))
    print_lines(console, line)
    if problem.remedy:
        print_lines(console, Text.assemble("    ", (clean(problem.remedy), "green")))
