"""`moeverify mesh`: the device mesh of a case, its groups, and each rank's place and data."""

from __future__ import annotations

from moeverify.cli.arguments import Cases, Overrides, Pattern
from moeverify.cli.context import open_context


def mesh(cases: Cases, *, overrides: Overrides = None, pattern: Pattern = None) -> None:
    """Show the device mesh of each case.

    Its axes and groups, and each rank's coordinates and data.
    """
    with open_context() as door:
        from moeverify.controller.mesh import make_picture
        from moeverify.report.mesh import render
        from moeverify.validation.load import load_cases

        for position, case in enumerate(load_cases(cases, overrides=tuple(overrides or ()), pattern=pattern)):
            if position:
                door.out.print()
            render(make_picture(case), door.out)
