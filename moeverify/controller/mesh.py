"""The mesh of a case as data for the console: coordinates, groups, and what each rank sees and holds. No torch."""

from __future__ import annotations

from moeverify.axes.groups import cuts_experts_apart
from moeverify.axes.mesh import MeshPlan
from moeverify.axes.split import split_rows
from moeverify.case.schema import Case
from moeverify.parallel.context_parallel import split_positions
from moeverify.report.mesh import MeshPicture, RankPlace


def make_picture(case: Case) -> MeshPicture:
    """Return what `moeverify mesh` shows of a case."""
    layout, plan = case.layout, MeshPlan.of(case.layout)
    axes = {axis: size for axis, size in plan.data.axes.items() if size > 1}
    apart = ("ep", "etp") if cuts_experts_apart(case) else ()
    borrowed = {axis: plan.sparse.axes[axis] for axis in apart if plan.sparse.axes[axis] > 1}
    groups = {axis: plan.data.groups(axis) for axis in axes}
    groups |= {axis: plan.sparse.groups(axis) for axis in borrowed}
    named = {name: tuple(tuple(group) for group in found) for name, found in groups.items()}
    ranks = tuple(_place(case, plan, rank) for rank in range(layout.world_size))
    return MeshPicture(case.name, axes, ranks, named, borrowed)


def _place(case: Case, plan: MeshPlan, rank: int) -> RankPlace:
    layout, data = case.layout, case.recipe.data
    place = plan.data.coordinates(rank)
    rows = split_rows(data.batch, layout.data_ranks, plan.row_share(rank))
    positions = split_positions(data.seq_len, layout.cp, place["cp"], layout.context_parallel)
    holds: dict[str, tuple[int, ...]] = {}
    model = case.recipe.model
    if model.moe is not None and layout.ep > 1:
        size = model.moe.num_experts // layout.ep
        first = plan.sparse.coordinates(rank)["ep"] * size
        holds["experts"] = tuple(range(first, first + size))
    known = {
        axis: at for axis, at in plan.coordinates(rank).items() if axis != "etp" or cuts_experts_apart(case)
    }
    return RankPlace(rank, known, tuple(rows), tuple(positions), holds)
