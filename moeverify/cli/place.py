"""`moeverify place`: computes a placement of experts on ranks from a load trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeverify.cli.arguments import RanksPerNode, Save, WorldSize
from moeverify.cli.context import open_context

if TYPE_CHECKING:
    from moeverify.tools.placement.plan import PlacementPlan


_Trace = Annotated[
    Path,
    typer.Argument(metavar="TRACE", help="A load trace, or an array of numpy (.npy).", show_default=False),
]
_Slots = Annotated[
    int, typer.Option("--slots", min=1, help="Experts that a rank has room for.", show_default=False)
]
_Current = Annotated[
    Path | None,
    typer.Option("--current", metavar="FILE", help="The placement in use. Default: equal blocks."),
]
_MaxMoves = Annotated[
    int | None,
    typer.Option(
        "--max-moves",
        min=0,
        metavar="N",
        help="Send at most N experts: the fewest with 95 % of the gain.",
    ),
]
_Last = Annotated[
    int | None, typer.Option("--last", min=1, metavar="N", help="Use only the last N steps of the trace.")
]
_Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write a picture of the loads.")]


def place(
    trace: _Trace,
    *,
    world_size: WorldSize,
    slots: _Slots,
    ranks_per_node: RanksPerNode = None,
    current: _Current = None,
    max_moves: _MaxMoves = None,
    last: _Last = None,
    save: Save = None,
    svg: _Svg = None,
) -> None:
    """Place experts where the load is, with replicas of hot ones in spare slots.

    Prints the loads before and after, a bound that no placement can go below, and the placement.
    """
    from json import dumps

    with open_context() as context:
        from moeverify.report.files import check_writable
        from moeverify.report.progress import show_work
        from moeverify.tools.placement.cluster import Cluster
        from moeverify.tools.placement.placement_file import read_placement
        from moeverify.tools.placement.plan import collect, make_plan, plan_to_dict
        from moeverify.tools.placement.text import print_plan
        from moeverify.tools.placement.trace_file import read_trace

        check_writable([file for file in (save, svg) if file is not None])
        load_trace, cluster, placement = collect(
            lambda: read_trace(trace, last=last),
            lambda: Cluster.of_nodes(world_size, ranks_per_node),
            lambda: None if current is None else read_placement(current),
        )
        with show_work(context.err, "placing experts"):
            plan = make_plan(
                load_trace,
                cluster,
                slots,
                current=placement,
                trace_file=str(trace),
                current_file="" if current is None else str(current),
                max_moves=max_moves,
            )
        print_plan(plan, context.out, name=str(trace))
        _write_files(plan, save, svg)
        context.reply.document = dumps(plan_to_dict(plan))


def _write_files(plan: PlacementPlan, save: Path | None, svg: Path | None) -> None:
    """Write the requested files."""
    import json

    from moeverify.report.files import write_atomically
    from moeverify.tools.placement.picture import draw_plan
    from moeverify.tools.placement.placement_file import format_placement, placement_to_dict

    placement = plan.after.placement
    if save is not None:
        is_json = save.suffix == ".json"
        text = json.dumps(placement_to_dict(placement)) if is_json else format_placement(placement)
        write_atomically(save, text)
    if svg is not None:
        write_atomically(svg, draw_plan(plan))
