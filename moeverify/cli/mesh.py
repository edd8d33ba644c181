"""`moeverify mesh`: the device mesh of a case, its groups, and the place and data of each rank."""

from __future__ import annotations

from typing import Annotated

import typer

from moeverify.cli.arguments import CaseSelection
from moeverify.cli.context import open_context
from moeverify.cli.options import with_groups


@with_groups
def mesh(
    *,
    selection: CaseSelection,
    per_node: Annotated[
        int | None,
        typer.Option(
            "--ranks-per-node", min=1, metavar="N", help="Show which groups stay inside a node of N ranks."
        ),
    ] = None,
) -> None:
    """Show the device mesh of each case.

    Its axes and groups, and each rank's coordinates and data.
    """
    with open_context() as context:
        from moeverify.report.mesh import render
        from moeverify.results.mesh import MeshPictures
        from moeverify.verification.controller.mesh import make_picture

        pictures = tuple(make_picture(case, per_node or 0) for case in selection.load())
        for position, picture in enumerate(pictures):
            if position:
                context.out.print()
            render(picture, context.out)
        context.reply.facts = MeshPictures(meshes=pictures)
        context.reply.advise(["run", *selection.list_words()], "verify these cases")
