"""`moeverify explain`: the evidence behind a finding of a kept run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moeverify.cli.context import open_context


def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder of --out, or a file of --json.")],
    finding: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FINDING]", help="A number, or words of its `check: tensor`; all if left out."
        ),
    ] = None,
    bound: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Show where the bounds of tensors come from: words of their `check: tensor`."
        ),
    ] = None,
) -> None:
    """Show the evidence behind a finding: coefficients, residuals, and every test that was tried.

    Without FINDING, list the findings that follow from no other, with their numbers.
    """
    with open_context() as context:
        from moeverify.report.bounds import choose_bounds, render_bounds
        from moeverify.report.explanation import (
            choose_finding,
            number_findings,
            render_explanation,
            render_list,
        )
        from moeverify.report.formats.json import read_run

        result = read_run(run)
        if bound is not None:
            render_bounds(choose_bounds(result, bound), context.out)
            return
        if not finding:
            render_list(result, context.out, run)
            return
        item = choose_finding(result, " ".join(finding))
        render_explanation(item, len(number_findings(result)), context.out)
