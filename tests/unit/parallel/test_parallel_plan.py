"""The tensors that the ranks of a layout store together: complete, replicated and sharded as declared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moeverify.cases.axes.claims import axis_claims
from moeverify.cases.axes.mesh import MeshPlan
from moeverify.cases.axes.registry import EXPERT_AXES
from moeverify.cases.schema import Case
from moeverify.parallel.regions.region import Region

pytestmark = pytest.mark.slow

STAGES = {"pp": 2, "micro_batches": 2, "stage_layers": (2, 1)}

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "ddp": {"dp_replicate": 2, "data_parallel": "ddp"},
    "ddp-ep": {"dp_replicate": 4, "ep": 2, "data_parallel": "ddp"},
    "fsdp2": {"dp_shard": 2},
    "hsdp-ep": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "fsdp2-ep": {"dp_shard": 4, "ep": 2},
    "tp": {"tp": 2},
    "fsdp2-tp": {"dp_shard": 2, "tp": 2, "sequence_parallel": True, "loss_parallel": True},
    "tp-ep-etp": {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2},
    "tp-etp4": {"dp_shard": 2, "tp": 2, "etp": 4},
    "cp-ep": {"dp_shard": 2, "cp": 2, "ep": 4},
    "alltoall": {"cp": 2, "context_parallel": "alltoall"},
    "recompute": {"dp_shard": 2, "recompute": True},
    "pp": STAGES,
    "pp-fsdp2-ep": {**STAGES, "dp_shard": 2, "ep": 2},
    "pp-zbv": {"pp": 2, "micro_batches": 2, "stage_layers": (0, 1, 1, 1), "pipeline_schedule": "zbv"},
}

Stored = dict[str, dict[int, Region]]  # parameter -> rank -> the stored region


def store(case: Case, as_rank: Callable[[Case, int], Any]) -> Stored:
    stored: Stored = {}
    for rank in range(case.layout.world_size):
        with as_rank(case, rank) as model:
            for shard in model.done.shards:
                assert shard.local().shape == shard.region.local_shape, shard.name
                stored.setdefault(shard.name, {})[rank] = shard.region
    return stored


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_is_stored_equally_often(name: str, make: Any, as_rank: Any) -> None:
    case = make(**LAYOUTS[name])
    for parameter, regions in store(case, as_rank).items():
        shape = next(iter(regions.values())).shape
        times = torch.zeros(shape, dtype=torch.int64)
        for region in regions.values():
            region.put(times, region.take(times) + 1)
        assert times.min() == times.max(), parameter
        elements = sum(region.numel for region in regions.values())
        assert int(times.max()) == elements // math.prod(shape), parameter


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_an_axis_claims_to_divide_is_divided_over_its_ranks(name: str, make: Any, as_rank: Any) -> None:
    case = make(**LAYOUTS[name])
    stored = store(case, as_rank)
    claims = axis_claims(case, MeshPlan.of(case.layout))
    weights = {axis: claim for axis, claim in claims.items() if claim.kind == "initial_weight"}
    for axis, claim in weights.items():
        covered = [regions for key, regions in stored.items() if claim.covers((-1, "initial_weight", key))]
        assert covered, axis
        for group in claim.groups:
            # Not of every tensor (norms are replicated over tp), but of at least one.
            divided = [
                {rank: regions.get(rank) for rank in group}
                for regions in covered
                if len({region.key if region else None for region in map(regions.get, group)}) == len(group)
            ]
            assert divided, (axis, group)


def test_a_pipeline_has_each_layer_once_and_the_tied_embedding_twice(make: Any, as_rank: Any) -> None:
    case = make(preset="stress-tied", model={"num_layers": 3}, **STAGES)
    stored = store(case, as_rank)
    layers = {int(name.split(".")[1]): set(regions) for name, regions in stored.items() if "layers." in name}
    assert layers == {0: {0}, 1: {0}, 2: {1}}
    assert set(stored["embed.weight"]) == {0, 1}
    assert "lm_head.weight" not in stored
    counted: Counter[str] = Counter()
    for rank in range(2):
        with as_rank(case, rank) as model:
            counted.update(shard.name for shard in model.done.counted)
    assert set(counted.values()) == {1}


def test_groups_with_the_same_part_are_one_and_those_of_experts_apart(make: Any, as_rank: Any) -> None:
    case = make(dp_shard=2, cp=2, ep=2)
    with as_rank(case, 0) as model:
        meshes = model.meshes
        # cp and ep both have ranks 0 and 1, but their collectives must not wait for each other.
        assert meshes.group("cp") is not meshes.group("ep")
        assert meshes.group("tp") is meshes.group("dp_replicate")  # one rank each
        assert meshes.group("fsdp") is meshes.group("loss")  # all ranks: the default group
        assert {meshes.size(axis) for axis in EXPERT_AXES if axis in meshes.plan.sparse.axes} == {1, 2}
        with pytest.raises(KeyError):
            meshes.size("edp")  # an axis of DDP


@pytest.mark.parametrize(
    ("layout", "scale"),
    [
        ({}, 1),
        ({"dp_shard": 4}, 4),
        ({"dp_shard": 2, "cp": 2}, 4),
        ({"tp": 2}, 1),
        ({"dp_shard": 2, "tp": 2}, 2),
    ],
)
def test_the_loss_is_scaled_by_the_ranks_that_gradients_are_averaged_over(
    layout: dict[str, Any], scale: int, make: Any, as_rank: Any
) -> None:
    with as_rank(make(**layout), 0) as model:
        assert model.done.num_loss_ranks == scale


def test_routers_see_a_slice_of_the_positions_where_tp_is_lent_to_the_experts(
    make: Any, as_rank: Any
) -> None:
    positions = range(8, 16)
    with as_rank(make(tp=2, ep=2), 1) as model:
        assert model.done.router_positions(positions) == range(12, 16)
    with as_rank(make(tp=2), 1) as model:
        assert model.done.router_positions(positions) == positions


def test_a_norm_over_flat_shards_is_summed_over_their_ranks(make: Any, as_rank: Any) -> None:
    for kind, is_summed in (("fsdp1", True), ("fsdp2", False)):
        with as_rank(make(dp_shard=2, data_parallel=kind), 0) as model:
            assert (model.done.sum_over_shards is not None) == is_summed
