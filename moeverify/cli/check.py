"""`moeverify check`: validation of case files, without running anything."""

from __future__ import annotations

from dataclasses import replace

from moeverify.cli.arguments import CaseSelection
from moeverify.cli.context import open_context
from moeverify.cli.options import with_groups


@with_groups
def check(*, selection: CaseSelection) -> None:
    """Validate cases without running them.

    Prints one line a case, or all problems. The functions that cases name must exist; they are not imported.
    """
    with open_context() as context:
        from moeverify.cases.axes.describe import describe_layout
        from moeverify.errors import CaseError
        from moeverify.report.case_list import describe_recipe, render_catalog
        from moeverify.results.listed import CheckedCase, CheckedCases
        from moeverify.verification.controller.search_path import examine_functions

        cases = selection.load()
        problems = [replace(each, file=case.file) for case in cases for each in examine_functions(case)]
        if problems:
            raise CaseError(problems)
        checked = tuple(
            CheckedCase(
                name=case.name,
                file=case.file,
                ranks=case.layout.world_size,
                layout=describe_layout(case.layout),
                recipe=describe_recipe(case.recipe),
            )
            for case in cases
        )
        render_catalog(checked, context.out)
        context.reply.facts = CheckedCases(cases=checked)
        context.reply.advise(["run", *selection.list_words()], "verify them")
