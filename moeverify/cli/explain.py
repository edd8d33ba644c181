"""`moeverify explain`: the evidence behind a finding of a kept run, and the meaning of a code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moeverify.cli.context import open_context
from moeverify.cli.outputs import JsonBrief


def explain(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN|CODE", help="A folder of --out, a file of --json, or a code of a cause."),
    ],
    finding: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FINDING]", help="A number, or words of its `check: tensor`; all if left out."
        ),
    ] = None,
    json_brief: JsonBrief = False,
    bound: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Show the sources of bounds; NAME has words of `check: tensor`."),
    ] = None,
) -> None:
    """Show the evidence behind a finding: coefficients, residuals, and every test that was tried.

    Without FINDING, list the root findings with their numbers: those that no other finding explains. A CODE, such as
    missing-reduction, is the `code` or `mechanism` of a finding in JSON.
    """
    with open_context() as context:
        from moeverify.report.bounds import choose_bounds, render_bounds
        from moeverify.report.codes import check_code, describe_code
        from moeverify.report.explanation import (
            choose_finding,
            number_findings,
            render_explanation,
            render_list,
        )
        from moeverify.report.formats.json import read_run
        from moeverify.report.progress import show_work

        if not run.exists() and run.stem == str(run):
            check_code(str(run))
        page = "" if finding or bound or run.exists() else describe_code(str(run), _list_examples)
        if page:
            context.out.print(page, soft_wrap=True)
            return
        with show_work(context.err, f"reading {run}"):
            result = read_run(run)
        if bound is not None:
            render_bounds(choose_bounds(result, bound), context.out)
            return
        item = choose_finding(result, " ".join(finding)) if finding else None
        if json_brief:
            from moeverify.report.brief import format_brief
            from moeverify.report.next_steps import Kept

            typer.echo(format_brief(result, Kept.at(run), item))
        elif item is None:
            render_list(result, context.out, run)
        else:
            render_explanation(item, len(number_findings(result)), context.out)


def _list_examples(code: str) -> list[tuple[str, str]]:
    """Return the known bugs whose diagnosis has this code, as (number, title)."""
    from moeverify.faults.catalogue import load_faults

    return [(fault.number, fault.title) for fault in load_faults().values() if code in fault.expected.causes]
