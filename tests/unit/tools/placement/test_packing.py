"""The heuristic's batched parts against plain loops over replicas and slots."""

from __future__ import annotations

import numpy as np
import pytest

from moeverify.tools.placement.packing import EMPTY, count_replicas, count_slots, fill_slots, pack, swap_pairs


def draw_load(random: np.random.Generator, num_layers: int, num_experts: int) -> np.ndarray:
    """Return loads (B, E), some of them 0 and some of them equal."""
    load = np.round(random.random((num_layers, num_experts)) ** 4 * 100)
    return load * (random.random((num_layers, num_experts)) < 0.9)


def pack_one_by_one(load: np.ndarray, counts: np.ndarray, num_ranks: int, num_slots: int) -> list[list[int]]:
    """Return the experts of each rank of one layer: largest replica first, to the lightest allowed rank."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = np.zeros(num_ranks)
    for expert in np.argsort(-load / counts, kind="stable"):
        for _ in range(counts[expert]):
            may = [r for r in range(num_ranks) if len(ranks[r]) < num_slots and expert not in ranks[r]]
            if may:
                rank = min(may, key=lambda r: loads[r])
                ranks[rank].append(int(expert))
                loads[rank] += load[expert] / counts[expert]
    return ranks


@pytest.mark.parametrize("seed", range(40))
def test_replicas_go_one_by_one_to_the_lightest_rank(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_experts, num_ranks = int(random.integers(1, 30)), int(random.integers(1, 9))
    num_slots = -(-num_experts // num_ranks) + int(random.integers(0, 4))
    load = draw_load(random, 4, num_experts)
    counts = count_replicas(load, num_ranks * num_slots, num_ranks)
    packing = pack(load, counts, num_ranks, num_slots)
    for layer in range(4):
        ranks = pack_one_by_one(load[layer], counts[layer], num_ranks, num_slots)
        assert [[e for e in row if e != EMPTY] for row in packing.slots[layer].tolist()] == ranks


def exchange_best(slots: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return the slots and sizes (2, S) of two ranks after their best exchange, and whether there is one."""
    loads = sizes.sum(1)
    heavy, light = (0, 1) if loads[0] >= loads[1] else (1, 0)
    half = (loads[heavy] - loads[light]) / 2
    found, least = None, half * (1 - 1e-9)
    for out in range(slots.shape[1]):
        for back in range(slots.shape[1]):
            given, taken = slots[heavy, out], slots[light, back]
            is_barred = (given != EMPTY and given in slots[light]) or (
                taken != EMPTY and taken in slots[heavy]
            )
            distance = abs(sizes[heavy, out] - sizes[light, back] - half)
            if not is_barred and distance < least:
                found, least = (out, back), distance
    if found is None:
        return slots, sizes, False
    slots, sizes = slots.copy(), sizes.copy()
    for array in (slots, sizes):
        array[heavy, found[0]], array[light, found[1]] = array[light, found[1]], array[heavy, found[0]]
    return slots, sizes, True


@pytest.mark.parametrize("seed", range(40))
def test_two_ranks_make_their_best_exchange(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_experts, num_slots = int(random.integers(2, 9)), int(random.integers(1, 6))
    slots = np.full((1, 2, num_slots), EMPTY)
    sizes = np.zeros((1, 2, num_slots))
    load = random.random(num_experts) ** 3
    for rank in range(2):
        held = random.permutation(num_experts)[: random.integers(1, num_slots + 1)]
        slots[0, rank, : len(held)], sizes[0, rank, : len(held)] = held, load[held]
    expected, expected_sizes, _ = exchange_best(slots[0], sizes[0])
    actual = swap_pairs(slots, sizes, num_rounds=1)
    assert actual.slots[0].tolist() == expected.tolist()
    assert actual.loads[0] == pytest.approx(expected_sizes.sum(1))


@pytest.mark.parametrize("has_fixed", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_swaps_keep_all_replicas_and_what_is_fixed(seed: int, has_fixed: bool) -> None:
    random = np.random.default_rng(seed)
    load = draw_load(random, 3, 24)
    counts = count_replicas(load, 30, 6)
    packing = pack(load, counts, 6, 6)
    each = np.concatenate([load / count_slots(packing.slots, 24), np.zeros((3, 1))], axis=1)
    sizes = each[np.arange(3)[:, None, None], packing.slots]
    is_fixed = random.random(sizes.shape) < 0.3 if has_fixed else None
    swapped = swap_pairs(packing.slots, sizes, 30, is_fixed)
    assert (count_slots(swapped.slots, 24) == count_slots(packing.slots, 24)).all()
    for row in swapped.slots.reshape(-1, 6).tolist():
        held = [expert for expert in row if expert != EMPTY]
        assert len(set(held)) == len(held)
    assert (swapped.loads.max(1) <= packing.loads.max(1) * (1 + 1e-12)).all()
    if is_fixed is not None:
        assert (swapped.slots[is_fixed] == packing.slots[is_fixed]).all()


@pytest.mark.parametrize("seed", range(10))
def test_filled_slots_raise_no_largest_load(seed: int) -> None:
    random = np.random.default_rng(seed)
    load = draw_load(random, 3, 20)
    packing = pack(load, count_replicas(load, 22, 5), 5, 7)
    filled = fill_slots(packing, load)
    counts = count_slots(filled.slots, 20)
    for layer in range(3):
        held = [{e for e in row if e != EMPTY} for row in filled.slots[layer].tolist()]
        loads = [sum(load[layer, e] / counts[layer, e] for e in experts) for experts in held]
        assert filled.loads[layer] == pytest.approx(loads)
        assert max(loads) <= packing.loads[layer].max() * (1 + 1e-9)
    assert (counts >= count_slots(packing.slots, 20)).all()
