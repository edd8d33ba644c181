"""Coordinates and groups of every view of a layout, against a brute-force reshape of the ranks."""

from __future__ import annotations

import itertools

import pytest
import torch

from moeverify.cases.axes.mesh import MeshPlan, View
from moeverify.cases.axes.split import split_rows
from moeverify.cases.schema import Layout
from moeverify.parallel.context_parallel import split_positions

LAYOUTS = {
    "hsdp-cp-ep": Layout(dp_replicate=2, dp_shard=2, cp=2, ep=4),
    "fsdp-tp-ep": Layout(dp_shard=4, tp=2, ep=4),
    "tp-ep-etp": Layout(dp_shard=2, tp=2, ep=2, etp=2),
    "ddp-ep": Layout(dp_replicate=4, ep=2, data_parallel="ddp"),
    "one rank": Layout(),
    "pp": Layout(pp=2, dp_shard=2, tp=2),
    "etp above tp": Layout(pp=2, dp_shard=2, tp=2, etp=4),
    "etp below tp": Layout(dp_shard=2, tp=4, etp=2, ep=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("view_name", ["data", "dense", "sparse", "loss"])
def test_views_are_factorizations_of_the_world(name: str, view_name: str) -> None:
    layout = LAYOUTS[name]
    view: View = getattr(MeshPlan.of(layout), view_name)
    ranks = torch.arange(layout.world_size).reshape(tuple(view.axes.values()))
    assert view.world_size == layout.world_size
    for rank in range(layout.world_size):
        assert int(ranks[tuple(view.coordinates(rank).values())]) == rank
    for number in range(len(view.axes) + 1):
        for axes in itertools.combinations(view.axes, number):
            kept = [dim for dim, axis in enumerate(view.axes) if axis not in axes]
            merged = [dim for dim, axis in enumerate(view.axes) if axis in axes]
            size = torch.Size([view.axes[axis] for axis in axes]).numel()
            expected = ranks.permute(*kept, *merged).reshape(-1, size).tolist()
            assert sorted(view.groups(*axes)) == sorted(expected)


def test_groups_of_a_layout_written_out() -> None:
    plan = MeshPlan.of(LAYOUTS["hsdp-cp-ep"])
    assert plan.data.groups("cp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert plan.data.groups("dp_shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert plan.dense.groups("fsdp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert plan.sparse.groups("ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert plan.sparse.axes["efsdp"] == 1
    assert plan.coordinates(6) == {"dp_replicate": 1, "dp_shard": 1, "cp": 0, "ep": 2}


def test_experts_are_lent_the_tensor_parallel_ranks_unless_they_use_them() -> None:
    lent = MeshPlan.of(LAYOUTS["fsdp-tp-ep"]).sparse
    assert dict(lent.axes) == {"pp": 1, "dp_replicate": 1, "efsdp": 2, "ep": 4, "etp": 1}
    used = MeshPlan.of(LAYOUTS["tp-ep-etp"]).sparse
    assert dict(used.axes) == {"pp": 1, "dp_replicate": 1, "efsdp": 1, "ep": 2, "etp": 2}
    assert used.groups("ep") == [[0, 2], [1, 3]]
    copies = MeshPlan.of(LAYOUTS["ddp-ep"]).sparse
    assert dict(copies.axes) == {"pp": 1, "edp": 2, "ep": 2, "etp": 1}
    assert copies.groups("edp") == [[0, 2], [1, 3]]


def test_rows_are_split_evenly_and_in_order() -> None:
    assert [split_rows(8, 4, rank) for rank in range(4)] == [range(2), range(2, 4), range(4, 6), range(6, 8)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_zigzag_covers_all_positions_with_equal_causal_work(num_ranks: int) -> None:
    parts = [tuple(split_positions(16, num_ranks, rank, "allgather")) for rank in range(num_ranks)]
    assert sorted(itertools.chain(*parts)) == list(range(16))
    assert len({sum(position + 1 for position in part) for part in parts}) == 1
    assert all(list(part) == sorted(part) for part in parts)


def test_runs_of_positions_where_heads_are_exchanged() -> None:
    parts = [split_positions(16, 4, rank, "alltoall") for rank in range(4)]
    assert parts == [range(4), range(4, 8), range(8, 12), range(12, 16)]


def test_experts_are_cut_over_ranks_of_other_axes_than_tp() -> None:
    above = MeshPlan.of(LAYOUTS["etp above tp"]).sparse
    assert dict(above.axes) == {"pp": 2, "dp_replicate": 1, "efsdp": 1, "ep": 1, "etp": 4}
    assert above.groups("etp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    below = MeshPlan.of(LAYOUTS["etp below tp"]).sparse
    assert dict(below.axes) == {"pp": 1, "dp_replicate": 1, "efsdp": 2, "ep": 2, "etp": 2}
    assert below.groups("etp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert below.groups("ep") == [[0, 2], [1, 3], [4, 6], [5, 7]]
