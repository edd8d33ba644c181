"""`moeverify check`: what the case files say, without running anything."""

from __future__ import annotations

from moeverify.cli.arguments import Cases, Overrides, Pattern
from moeverify.cli.context import open_context


def check(cases: Cases, *, overrides: Overrides = None, pattern: Pattern = None) -> None:
    """Validate cases without running them.

    Prints one line a case, or all problems.
    """
    with open_context() as door:
        from moeverify.axes.describe import describe_layout
        from moeverify.case.describe import describe_recipe
        from moeverify.report.case_list import CaseLine, render_catalog
        from moeverify.validation.load import load_cases

        loaded = load_cases(cases, overrides=tuple(overrides or ()), pattern=pattern)
        lines = [
            CaseLine(
                case.name, case.layout.world_size, describe_layout(case.layout), describe_recipe(case.recipe)
            )
            for case in loaded
        ]
        render_catalog(lines, door.out)
