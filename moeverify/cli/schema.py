"""`moeverify schema`: the fields of a case file and of JSON results, for editors, programs and readers."""

from __future__ import annotations

from typing import Annotated

import typer

from moeverify.cli.context import open_context


def schema(
    *,
    page: Annotated[
        bool, typer.Option("--page", help="Print the reference page (Markdown) instead.")
    ] = False,
    results: Annotated[
        bool,
        typer.Option("--results", help="Print the schema of --json and --json-brief instead."),
    ] = False,
) -> None:
    """Print the JSON schema of a case file.

    An editor completes and explains the fields with it: `moeverify schema > case.schema.json`.
    """
    with open_context() as door:
        import json

        from moeverify.cases.validation.reference import make_json_schema, render_page
        from moeverify.errors import CaseError, Problem
        from moeverify.report.results_schema import make_results_schema

        if page and results:
            remedy = "leave out one of --page and --results; docs/reports.md has the keys of results"
            raise CaseError([Problem("only the fields of a case have a page", path="--page", remedy=remedy)])
        content = make_results_schema() if results else make_json_schema()
        text = render_page() if page else json.dumps(content, indent=2) + "\n"
        door.out.print(text, end="", markup=False, highlight=False, soft_wrap=True)
