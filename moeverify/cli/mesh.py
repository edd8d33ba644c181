"""`moeverify mesh`: the device mesh of a case, its groups, and the place and data of each rank."""

from __future__ import annotations

from moeverify.cli.arguments import CaseSelection, RanksPerNode
from moeverify.cli.context import open_context
from moeverify.cli.options import with_groups


@with_groups
def mesh(
    *,
    selection: CaseSelection,
    ranks_per_node: RanksPerNode = None,
) -> None:
    """Show the device mesh of each case.

    Its axes and groups, and each rank's coordinates and data. With --ranks-per-node: which groups stay inside a node.
    """
    with open_context() as context:
        from moeverify.report.mesh import render
        from moeverify.results.mesh import MeshPictures
        from moeverify.verification.controller.mesh import make_picture

        pictures = tuple(make_picture(case, ranks_per_node or 0) for case in selection.load())
        for position, picture in enumerate(pictures):
            if position:
                context.out.print()
            render(picture, context.out)
        context.reply.facts = MeshPictures(meshes=pictures)
        context.reply.advise(["run", *selection.list_words()], "verify these cases")
