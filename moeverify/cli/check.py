"""`moeverify check`: validation of case files, without running anything."""

from __future__ import annotations

from moeverify.cli.arguments import CaseSelection
from moeverify.cli.context import open_context
from moeverify.cli.options import with_groups


@with_groups
def check(*, selection: CaseSelection) -> None:
    """Validate cases without running them.

    Prints one line a case, or all problems.
    """
    with open_context() as context:
        from moeverify.cases.axes.describe import describe_layout
        from moeverify.cases.describe import describe_recipe
        from moeverify.report.case_list import CaseLine, render_catalog

        lines = [
            CaseLine(
                case.name, case.layout.world_size, describe_layout(case.layout), describe_recipe(case.recipe)
            )
            for case in selection.load()
        ]
        render_catalog(lines, context.out)
