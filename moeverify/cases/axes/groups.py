"""Mesh axes that a diagnosis may name: their groups, their degrees, and the tensors they affect.

No torch: the controller uses this too, for layouts that have not run.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from moeverify.cases.axes.mesh import MeshPlan
from moeverify.cases.axes.registry import AXES, AXIS_OF
from moeverify.cases.schema import Case, Layout

# Possible divisors of a loss: all tokens of the global batch, and those that are not padding.
TOKENS, VALID_TOKENS = "tokens of the batch", "valid tokens of the batch"
ROWS = "rows of the batch"

# Integers that are no axes, and of which tensors they can be a factor.
LAYERS = "layers"
TIED_USES, TOP_K, EXPERTS = "uses of the tied weight", "top_k", "experts"
_OF_TENSORS = {TIED_USES: "embed.weight", TOP_K: "*.moe.*"}
_OF_MODULES = {EXPERTS: "*.moe*", "heads": "*attention*", "key-value heads": "*attention*"}

# Joins the mesh axes in the name of a union of axes.
AND = " and "

Groups = Mapping[str, Sequence[Sequence[int]]]


def list_groups(case: Case) -> dict[str, list[list[int]]]:
    """Return the rank groups of every axis with more than one rank, the data axes first.

    Unions of axes come last, unless another axis has the same groups: `fsdp` (dp_shard and cp together) and
    `all data ranks` (all ranks with different tokens).
    """
    plan = MeshPlan.of(case.layout)
    found = {axis: plan.data.groups(axis) for axis, size in plan.data.axes.items() if size > 1}
    if cuts_experts_apart(case):
        sparse = plan.sparse.axes
        placing = [axis for axis, size in sparse.items() if size > 1 and AXIS_OF[axis].places_experts]
        found |= {axis: plan.sparse.groups(axis) for axis in placing}
    for name, label in _list_unions():
        view = plan.view_of(name)
        groups = view.groups(name)
        if view.axes[name] > 1 and groups not in found.values():
            found[label] = groups
    return found


def list_unions(case: Case) -> dict[str, list[list[int]]]:
    """Return the groups of `list_groups`, and of every union of mesh axes.

    A union has the names of its axes, such as `dp_replicate and cp`, unless it is `fsdp`.
    """
    data = MeshPlan.of(case.layout).data
    axes = [axis for axis, size in data.axes.items() if size > 1]
    found = {axis: groups for axis, groups in list_groups(case).items() if axis != AXIS_OF["loss"].label}
    for size in range(2, len(axes) + 1):
        for union in itertools.combinations(axes, size):
            groups = data.groups(*union)
            if groups not in found.values():
                found[AND.join(union)] = groups
    return found


def _list_unions() -> list[tuple[str, str]]:
    """Return names and labels of the unions of axes, the smallest first."""
    return [(axis.name, axis.label) for axis in reversed(AXES) if axis.is_union]


def list_degrees(case: Case) -> dict[str, int]:
    """Return the sizes that a factor may come from; expert axes only where experts are divided separately."""
    plan = MeshPlan.of(case.layout)
    axes = {**(plan.sparse.axes if cuts_experts_apart(case) else {}), **plan.data.axes}
    degrees = {axis: size for axis, size in axes.items() if size > 1}
    named = set(plan.data.axes.values())  # an expert axis of the same size does not explain other tensors
    unions = {
        label: plan.view_of(name).axes[name] for name, label in _list_unions() if AXIS_OF[name].is_factor
    }
    for label, size in {**unions, "all ranks": plan.world_size}.items():
        if size not in named:
            degrees[label] = size
            named.add(size)
    degrees["micro-batches"] = case.layout.micro_batches
    reference = case.recipe.model.reference
    if reference is not None:
        degrees[TIED_USES] = 2 if reference.tie_embedding else 1
        degrees[TOP_K] = reference.moe.top_k if reference.moe is not None else 1
    return {name: size for name, size in degrees.items() if size > 1}


def list_loss_counts(case: Case) -> dict[str, int]:
    """Return the counts of a recipe that may divide or multiply a loss term. Sizes of axes are left out."""
    data, reference = case.recipe.data, case.recipe.model.reference
    counts = {ROWS: data.batch, "positions of a row": data.seq_len}
    counts[TOKENS] = data.batch * data.seq_len
    if reference is not None and reference.moe is not None:
        counts["MoE layers"] = reference.num_layers - reference.num_dense_layers
        counts[EXPERTS], counts[TOP_K] = reference.moe.num_experts, reference.moe.top_k
    return {name: size for name, size in counts.items() if size > 1}


def list_module_counts(case: Case) -> dict[str, int]:
    """Return the counts that a module may multiply with by mistake. Sizes of axes are left out."""
    reference = case.recipe.model.reference
    if reference is None:
        return {}
    counts = {LAYERS: reference.num_layers, "heads": reference.num_heads}
    counts["key-value heads"] = reference.num_kv_heads
    if reference.moe is not None:
        counts[EXPERTS] = reference.moe.num_experts
    return {name: size for name, size in counts.items() if size > 1}


def cuts_experts_apart(case: Case) -> bool:
    """Return whether there may be experts that are divided over other ranks than the rest of the model."""
    layout = case.layout
    return case.recipe.model.may_have_experts and (layout.ep > 1 or layout.expert_tp != layout.tp)


def axis_affects(case: Case, axis: str, tensor: str) -> bool:
    """Return whether an axis affects a tensor; expert axes affect only tensors inside a MoE block.

    The names of experts in a user's own model are unknown, so there every axis may matter. Names that are
    not axes (`micro-batches`) affect every tensor.
    """
    if axis == "etp" and not cuts_experts_apart(case):
        return False  # its ranks are the ranks of tp
    if axis in _OF_TENSORS:
        return fnmatchcase(tensor, _OF_TENSORS[axis])
    if axis in _OF_MODULES:
        return fnmatchcase(tensor, _OF_MODULES[axis])
    found = AXIS_OF.get(axis)
    return found is None or case.recipe.model.reference is None or found.affects(tensor)


def name_ranks(case: Case, ranks: Sequence[int]) -> str:
    """Return the name of the axis that has these ranks as a group, or a list of the ranks."""
    wanted = list(ranks)
    if len(wanted) == case.layout.world_size and len(wanted) > 1:
        single = [axis for axis, groups in list_groups(case).items() if list(groups) == [wanted]]
        return single[0] if single else "all ranks"
    hits = [axis for axis, groups in list_groups(case).items() if wanted in [list(g) for g in groups]]
    return hits[0] if hits else "ranks " + ", ".join(map(str, wanted))


def find_source(layout: Layout, rank: int) -> int | None:
    """Return the coordinate on ep from which a rank sends token copies, or None if it sends none of its own.

    Ranks of tp route the same tokens, unless each has its own positions.
    """
    plan = MeshPlan.of(layout)
    if plan.data.coordinates(rank)["tp"] and not layout.slices_tokens:
        return None
    return plan.sparse.coordinates(rank)["ep"]
