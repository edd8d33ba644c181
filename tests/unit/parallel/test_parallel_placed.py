"""Placed experts: the ranks of token copies, stored parameters, and gradient sums of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moeverify.cases.axes.mesh import MeshPlan
from moeverify.cases.schema import Case
from moeverify.errors import MachineError
from moeverify.parallel.holder_groups import HolderGroups, list_holder_ranks
from moeverify.parallel.replica_routes import EqualBlocks, ReplicaRoutes
from moeverify.tools.placement.placement import Placement

ROWS = ((0, 3, 2), (1, 2), (2, 1), (4, 3, 0, 2))
NUM_EXPERTS = 5


def split_by_rule(copies: list[int], source: int) -> list[list[int]]:
    """Return the copies of each expert for each rank: kept by a rank that has it, else nearly even runs."""
    sent = [[0] * len(ROWS) for _ in copies]
    for expert, number in enumerate(copies):
        holders = [rank for rank, row in enumerate(ROWS) if expert in row]
        holders = [source] if source in holders else holders
        for place, rank in enumerate(holders):
            turn = (place - source - expert) % len(holders)
            sent[expert][rank] = number // len(holders) + (turn < number % len(holders))
    return sent


def draw_ids(num_tokens: int, top_k: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :top_k]


@pytest.mark.parametrize("source", range(len(ROWS)))
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_copies_are_shared_by_the_rule_of_the_solver(source: int, num_tokens: int) -> None:
    counts = torch.bincount(draw_ids(num_tokens, 2, source).flatten(), minlength=NUM_EXPERTS)
    actual = ReplicaRoutes(ROWS, NUM_EXPERTS, source).split(counts)
    assert actual.tolist() == split_by_rule(counts.tolist(), source)


@pytest.mark.parametrize("source", range(len(ROWS)))
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_each_copy_leaves_once_for_a_slot_of_its_expert(source: int, num_tokens: int) -> None:
    ids = draw_ids(num_tokens, 2, source)
    counts, order = ReplicaRoutes(ROWS, NUM_EXPERTS, source).sort(ids)
    assert sorted(order.tolist()) == list(range(ids.numel()))
    slots = [(rank, expert) for rank, row in enumerate(ROWS) for expert in row]
    start = 0
    for (rank, expert), count in zip(slots, counts.tolist(), strict=True):
        leaving = order[start : start + count]
        assert (ids.flatten()[leaving] == expert).all()
        assert leaving.tolist() == sorted(leaving.tolist()), "copies of a slot keep the order of their tokens"
        assert count == 0 or rank == source or expert not in ROWS[source], "what is here stays here"
        start += count
    assert start == ids.numel()


def test_equal_blocks_are_a_placement_like_any_other() -> None:
    ids = draw_ids(20, 2, seed=7) % 4
    blocks = EqualBlocks(4, 2)
    placed = ReplicaRoutes(((0, 1), (2, 3)), 4, source=1)
    assert blocks.num_slots == placed.num_slots
    assert all(torch.equal(one, other) for one, other in zip(blocks.sort(ids), placed.sort(ids), strict=True))


PLACEMENT = {"1": (tuple(range(11)), (3, *range(11, 16))), "2": (tuple(range(0, 16, 2)), tuple(range(1, 16)))}


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp_replicate": 2, "data_parallel": "ddp", "ep": 2},
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        {"dp_shard": 4, "ep": 2},
        {"tp": 2, "ep": 2},
        {"pp": 2, "dp_shard": 2, "ep": 2, "micro_batches": 2, "stage_layers": (2, 1)},
    ],
    ids=str,
)
def test_a_rank_stores_the_experts_of_its_row(
    degrees: dict[str, Any], make: Callable[..., Case], as_rank: Callable[[Case, int], Any]
) -> None:
    case = make(**degrees, placement=PLACEMENT)
    seen: set[str] = set()
    for rank in range(case.layout.world_size):
        coordinate = MeshPlan.of(case.layout).sparse.coordinates(rank)["ep"]
        with as_rank(case, rank) as model:
            stored: dict[str, list[int]] = {}
            for shard in model.done.shards:
                if ".experts." in shard.name:
                    assert shard.local().shape == shard.region.local_shape, shard.name
                    stored.setdefault(shard.name, []).extend(shard.region.dims[0])
            for name, experts in stored.items():
                layer = name.split(".")[1]
                assert sorted(experts) == sorted(PLACEMENT[layer][coordinate]), name
                seen.add(layer)
            counted = {id(shard.tensor) for shard in model.done.counted}
            assert not any(
                ".experts." in shard.name and id(shard.tensor) in counted for shard in model.done.shards
            )
    assert seen == {"1", "2"}


@pytest.mark.parametrize(
    ("degrees", "holders", "expected"),
    [
        ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, (0,), [[0, 2]]),
        ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, (0, 1), [[0, 1, 2, 3]]),
        ({"dp_shard": 4, "ep": 2}, (1,), [[1, 3]]),
        ({"dp_shard": 4, "ep": 4}, (1, 3), [[1, 3]]),
        ({"tp": 2, "dp_shard": 2, "ep": 4}, (0, 3), [[0, 3]]),
        ({"pp": 2, "dp_shard": 2, "ep": 2, "micro_batches": 2}, (1,), [[1], [3]]),
    ],
    ids=str,
)
def test_a_gradient_is_summed_over_all_copies_of_its_holders(
    degrees: dict[str, Any], holders: tuple[int, ...], expected: list[list[int]], make: Callable[..., Case]
) -> None:
    view = MeshPlan.of(make(**degrees).layout).sparse
    assert list_holder_ranks(view, holders) == expected


def test_a_group_that_the_backend_cannot_make_is_named_and_changes_nothing(
    make: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []

    def refuse_the_second(ranks: list[int], **options: Any) -> None:
        asked.append(ranks)
        if len(asked) == 2:
            raise RuntimeError("too many open files")

    monkeypatch.setattr("torch.distributed.new_group", refuse_the_second)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "gloo")
    case = make(dp_shard=4, ep=4)
    groups = HolderGroups(MeshPlan.of(case.layout).sparse)
    with pytest.raises(MachineError) as raised:
        groups.make(Placement(4, (((0, 1), (0, 2), (1, 3), (2, 3)),)))
    message = str(raised.value)
    assert "the backend gloo cannot make the group of ranks 0, 2, 3 of 5" in message
    assert "too many open files; no expert was moved; use a placement with fewer" in message
    assert groups.list_own() == []
