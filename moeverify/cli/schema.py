"""`moeverify schema`: the fields of a case file and of JSON results, for editors, programs and readers."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moeverify.cli.context import open_context


def schema(
    *,
    page: Annotated[
        bool, typer.Option("--page", help="Print the reference page (Markdown) instead.")
    ] = False,
    results: Annotated[
        bool,
        typer.Option(
            "--results", help="Print the schema of the files of --json and of --json-brief instead."
        ),
    ] = False,
) -> None:
    """Print the JSON schema of a case file.

    An editor completes and explains the fields with it: `moeverify schema > case.schema.json`.
    """
    with open_context() as door:
        import json

        from moeverify.cases.validation.reference import make_json_schema, render_page

        content = make_results_schema() if results else make_json_schema()
        text = render_page() if page else json.dumps(content, indent=2) + "\n"
        door.out.print(text, end="", markup=False, highlight=False, soft_wrap=True)


def make_results_schema() -> dict[str, Any]:
    """Return one schema for the JSON of runs, `bench`, `bisect`, `comm`, `doctor`, `route` and `--json-brief`."""
    from pydantic.json_schema import GenerateJsonSchema, models_json_schema

    from moeverify.results.bisection import Bisection
    from moeverify.results.brief import Brief
    from moeverify.results.collective_run import CollectiveRun
    from moeverify.results.measurement import BenchRun
    from moeverify.results.probe import Diagnostics
    from moeverify.results.route import RouteReport
    from moeverify.results.run import RunResult

    class WithInfinities(GenerateJsonSchema):
        """Schemas in which numbers that are not finite are strings, as a `Record` writes them."""

        def float_schema(self, schema: Any) -> dict[str, Any]:
            """Return the schema of a number."""
            return {"anyOf": [super().float_schema(schema), {"enum": ["NaN", "Infinity", "-Infinity"]}]}

    kinds = (RunResult, Brief, Bisection, BenchRun, CollectiveRun, Diagnostics, RouteReport)
    names, whole = models_json_schema(
        [(kind, "serialization") for kind in kinds],
        title="Results of moeverify",
        schema_generator=WithInfinities,
    )
    *objects, route = (names[kind, "serialization"] for kind in kinds)
    return {**whole, "anyOf": [*objects, {"type": "array", "items": route}]}
