"""Where the time of a run went, for `--timings`."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text
from tabulate import tabulate

from moeverify.report.console import print_lines
from moeverify.results.run import RunResult

_MOST_CASES = 10


def render_timings(run: RunResult, console: Console) -> None:
    """Print the wall time of a run by stage: ranks, goldens, the slowest cases and their parts."""
    rows = [
        (
            "start of the ranks",
            run.start_seconds,
            "imports and connections; `moeverify serve` keeps the imports",
        )
    ]
    rows += [(f"golden {golden.recipe}", golden.seconds, "") for golden in run.goldens]
    slowest = sorted(run.cases, key=lambda case: -case.seconds)
    for case in slowest[:_MOST_CASES]:
        parts = ", ".join(f"{stage.name} {stage.seconds:.1f}" for stage in case.stages)
        rows.append((f"case {case.name}", case.seconds, parts))
    if slowest[_MOST_CASES:]:
        rest = sum(case.seconds for case in slowest[_MOST_CASES:])
        rows.append((f"{len(slowest[_MOST_CASES:])} faster cases", rest, ""))
    other = run.seconds - sum(seconds for _, seconds, _ in rows)
    rows.append(("the rest", max(other, 0.0), "plans, files, ends of launches"))
    table = tabulate(rows, headers=("time of", "s", "parts in s"), floatfmt=".1f", tablefmt="plain")
    print_lines(console, Text(f"{table}\n"))
