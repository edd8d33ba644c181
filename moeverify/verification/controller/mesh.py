"""The mesh of a case for display: coordinates, groups, and the data and experts of each rank.

No torch import.
"""

from __future__ import annotations

from moeverify.cases.axes.expert_placement import find_placement, list_exchanges
from moeverify.cases.axes.groups import cuts_experts_apart
from moeverify.cases.axes.mesh import MeshPlan
from moeverify.cases.axes.split import split_rows
from moeverify.cases.schema import Case, Layout
from moeverify.parallel.context_parallel import split_positions
from moeverify.results.mesh import MeshPicture, MeshShape, RankPlace
from moeverify.tools.placement.placement import Placement


def make_picture(case: Case, per_node: int = 0) -> MeshPicture:
    """Return the data for `moeverify mesh`.

    `per_node` is the number of ranks per node, or 0 to omit nodes.
    """
    layout, plan = case.layout, MeshPlan.of(case.layout)
    axes = {axis: size for axis, size in plan.data.axes.items() if size > 1}
    apart = ("ep", "etp") if cuts_experts_apart(case) else ()
    borrowed = {axis: plan.sparse.axes[axis] for axis in apart if plan.sparse.axes[axis] > 1}
    groups = {axis: plan.data.groups(axis) for axis in axes}
    groups |= {axis: plan.sparse.groups(axis) for axis in borrowed}
    named = {name: tuple(tuple(group) for group in found) for name, found in groups.items()}
    ranks = tuple(_place(case, plan, rank) for rank in range(layout.world_size))
    return MeshPicture(
        name=case.name, axes=axes, ranks=ranks, groups=named, borrowed=borrowed, per_node=per_node
    )


def make_shape(layout: Layout) -> MeshShape:
    """Return the mesh axes of a layout with more than one rank, and the groups of such axes of all views."""
    plan = MeshPlan.of(layout)
    groups = {
        axis: tuple(map(tuple, view.groups(axis)))
        for view in plan.views
        for axis, size in view.axes.items()
        if size > 1
    }
    return MeshShape(axes={axis: size for axis, size in plan.data.axes.items() if size > 1}, groups=groups)


def _place(case: Case, plan: MeshPlan, rank: int) -> RankPlace:
    layout, data = case.layout, case.recipe.data
    place = plan.data.coordinates(rank)
    rows = split_rows(data.batch, layout.data_ranks, plan.row_share(rank))
    positions = split_positions(data.seq_len, layout.cp, place["cp"], layout.context_parallel)
    holds = _list_experts(case, plan.sparse.coordinates(rank).get("ep", 0))
    known = {
        axis: at for axis, at in plan.coordinates(rank).items() if axis != "etp" or cuts_experts_apart(case)
    }
    return RankPlace(rank=rank, coordinates=known, rows=tuple(rows), positions=tuple(positions), holds=holds)


def _list_experts(case: Case, coordinate: int) -> dict[str, tuple[int, ...]]:
    """Return the experts at a coordinate on ep, by MoE layer if the layers differ."""
    model = case.recipe.model.reference
    if model is None or model.moe is None or case.layout.ep == 1:
        return {}
    placement = find_placement(case.layout, model)
    if placement is None:
        size = model.moe.num_experts // case.layout.ep
        return {"experts": tuple(range(coordinate * size, (coordinate + 1) * size))}
    # With rebalancing, later placements depend on the load of the run and are not known in advance.
    holds = _list_rows(placement, coordinate, "experts at first" if case.layout.rebalance else "experts")
    for after, exchanged in sorted(list_exchanges(case.layout, model).items()):
        holds |= _list_rows(exchanged, coordinate, f"after step {after}")
    return holds


def _list_rows(placement: Placement, coordinate: int, title: str) -> dict[str, tuple[int, ...]]:
    rows = [tuple(sorted(matrix[coordinate])) for matrix in placement.matrices]
    if len(set(placement.matrices)) == 1:
        return {title: rows[0]}
    return {f"{title}, layer {layer}": row for layer, row in zip(placement.layers, rows, strict=True)}
