"""The solver: several numbers of replicas, each packed and balanced, and the best of each layer.

DeepSeek's EPLB gives every spare slot to the expert with the largest replicas, then packs. That minimizes
the largest replica. It often leaves many replicas slightly above half a mean load, and no two of these fit
on one rank. Fewer, larger replicas then pack better. The best size is not known in advance, so a few sizes
are tried between the smallest one and the mean load of a rank.

Notation: L MoE layers, B rows of a batch, E experts, R ranks, S slots per rank.
"""

from __future__ import annotations

import numpy as np

from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.load_trace import TokenLoad
from moeverify.tools.placement.marks import BoolArray
from moeverify.tools.placement.packing import (
    EMPTY,
    SlotPacking,
    count_for_size,
    count_replicas,
    count_slots,
    fill_slots,
    pack,
    swap_pairs,
)
from moeverify.tools.placement.relabel import move_to_sources
from moeverify.tools.placement.sharing import FloatArray, IntArray, measure_traffic, share_load

# Fractions of the way from the smallest possible largest replica to the mean load of a rank.
_SIZES = (0.25, 0.5, 0.75, 1.0)
_SWAP_ROUNDS = 14
_SWAP_ENOUGH = 1e-5  # above the mean load: no swaps below it

# Fractions of the spare slots that are used for replicas on every node.
_PARTS_EVERYWHERE = (0.0, 0.25, 0.5, 1.0)


def solve(load: TokenLoad, cluster: Cluster, num_slots: int) -> BoolArray:
    """Return a placement as marks (L, E, R): minimal largest load first, then little traffic.

    Every expert is placed, and every rank holds between one and S experts. A slot stays empty if any
    replica in it would increase the largest load. The result is deterministic and the same on every
    machine.
    """
    by_expert = load.by_expert
    packing = _solve_ranks(by_expert, cluster.num_ranks, num_slots)
    marks = mark_slots(packing.slots, by_expert.shape[1])
    if cluster.num_nodes == 1 and load.is_even:
        return marks
    if cluster.num_nodes > 1:
        candidates = [_solve_nodes(by_expert, cluster, num_slots, part) for part in _PARTS_EVERYWHERE]
        marks = choose_best([marks, *candidates], load, cluster)
    if not load.is_even:
        nearer = move_to_sources(marks, load.copies, cluster)
        marks = choose_best([marks, nearer], load, cluster)
    settled = _settle(marks, load, cluster, num_slots)
    return choose_best([settled, marks], load, cluster)


def choose_best(candidates: list[BoolArray], load: TokenLoad, cluster: Cluster) -> BoolArray:
    """Return for each layer the candidate (L, E, R) with the smallest largest load, then the least traffic.

    Largest loads are compared in thousandths of the mean: a smaller gain does not justify more traffic.
    """
    mean = np.maximum(load.copies.sum((1, 2)) / cluster.num_ranks, 1e-300)
    keys = []
    for marks in candidates:
        largest = share_load(marks, load.copies, cluster).sum(1).max(1) / mean
        traffic = measure_traffic(marks, load.copies, cluster)
        keys.append(np.stack([np.floor(largest * 1000), traffic.off_node, traffic.off_rank, largest]))
    table = np.stack(keys)  # (candidates, 4, L)
    best = [min(range(len(candidates)), key=lambda c: tuple(table[c, :, row])) for row in range(len(mean))]
    return np.stack([candidates[choice][row] for row, choice in enumerate(best)])


def mark_slots(slots: IntArray, num_experts: int) -> BoolArray:
    """Return the marks (B, E, R) of slots (B, R, S)."""
    num_layers, num_ranks, _ = slots.shape
    marks = np.zeros((num_layers, num_experts + 1, num_ranks), dtype=np.bool_)
    # An empty slot is expert -1, which indexes the extra last row.
    marks[np.arange(num_layers)[:, None, None], slots, np.arange(num_ranks)[None, :, None]] = True
    return marks[:, :num_experts]


def list_slots(marks: BoolArray, num_slots: int) -> IntArray:
    """Return slots (B, R, S) of marks (B, E, R), the experts of a rank in ascending order."""
    num_layers, _, num_ranks = marks.shape
    layers, ranks, experts = np.nonzero(marks.transpose(0, 2, 1))
    row = layers * num_ranks + ranks
    counts = np.bincount(row, minlength=num_layers * num_ranks)
    slot = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    slots = np.full((num_layers * num_ranks, num_slots), EMPTY)
    slots[row, slot] = experts
    return slots.reshape(num_layers, num_ranks, num_slots)


def _solve_ranks(load: FloatArray, num_ranks: int, num_slots: int) -> SlotPacking:
    """Return the best packing of loads (B, E), with k replicas of 1/k of the load each."""
    counts = count_replicas(load, num_ranks * num_slots, num_ranks)
    smallest = (load / counts).max(1)
    mean = load.sum(1) / num_ranks
    # A layer whose mean is below its smallest replica gains nothing from larger ones.
    is_spare = num_ranks * num_slots > max(load.shape[1], num_ranks)
    open_rows = np.flatnonzero((mean > smallest) & is_spare)
    # The smallest size for every layer, and the other sizes for `open_rows`: one batch, with rows (size,
    # layer).
    sizes = [smallest + part * (mean - smallest) for part in _SIZES]
    rows = np.concatenate([np.arange(len(load)), np.tile(open_rows, len(sizes))])
    larger = [count_for_size(load[open_rows], size[open_rows], num_ranks, num_ranks) for size in sizes]
    packing = pack(load[rows], np.concatenate([counts, *larger]), num_ranks, num_slots)
    best = _choose_packing(packing, rows, len(load))
    uneven = np.flatnonzero(best.loads.max(1) > np.maximum(mean, smallest) * (1 + _SWAP_ENOUGH))
    if len(uneven):
        swapped = _swap(SlotPacking(best.slots[uneven], best.loads[uneven]), load[uneven])
        best.slots[uneven], best.loads[uneven] = swapped
    return fill_slots(SlotPacking(_fill_ranks(best.slots, load), best.loads), load)


def _choose_packing(packing: SlotPacking, rows: IntArray, num_layers: int) -> SlotPacking:
    """Return the packing of each layer with the smallest largest load; `rows` is the layer of each one."""
    largest = packing.loads.max(1)
    # By layer, then load, then input order.
    order = np.lexsort((largest, rows))
    first = order[np.searchsorted(rows[order], np.arange(num_layers))]
    return SlotPacking(packing.slots[first], packing.loads[first])


def _swap(packing: SlotPacking, load: FloatArray) -> SlotPacking:
    """Return a packing balanced by swaps, with k replicas of 1/k of the load (B, E) each."""
    num_layers, num_experts = load.shape
    each = np.zeros((num_layers, num_experts + 1))  # the last column is for empty slots, expert -1
    each[:, :-1] = load / np.maximum(count_slots(packing.slots, num_experts), 1)
    sizes = each[np.arange(num_layers)[:, None, None], packing.slots]
    return swap_pairs(packing.slots, sizes, _SWAP_ROUNDS)


def _fill_ranks(slots: IntArray, load: FloatArray) -> IntArray:
    """Return slots (B, R, S) in which every rank has an expert.

    Only experts without load leave ranks empty. A rank with two or more experts gives away its lightest
    one.
    """
    is_empty = (slots == EMPTY).all(2)
    for layer in np.flatnonzero(is_empty.any(1)):
        for rank in np.flatnonzero(is_empty[layer]):
            held = slots[layer] != EMPTY
            weights = np.where(held & (held.sum(1) > 1)[:, None], load[layer][slots[layer]], np.inf)
            source, slot = np.unravel_index(weights.argmin(), weights.shape)
            slots[layer, rank, 0], slots[layer, source, slot] = slots[layer, source, slot], EMPTY
    return slots


def _settle(marks: BoolArray, load: TokenLoad, cluster: Cluster, num_slots: int) -> BoolArray:
    """Return a placement in which experts without replicas changed ranks to balance the true loads.

    With different sources or nodes, the replicas of an expert have unequal loads. They stay in place with
    the load from the sharing rule. An expert on one rank has the same load on any rank.
    """
    slots = list_slots(marks, num_slots)
    shares = share_load(marks, load.copies, cluster)
    layers, ranks = np.ogrid[: marks.shape[0], : marks.shape[2]]
    is_empty = slots == EMPTY
    sizes = np.where(is_empty, 0.0, shares[layers[..., None], slots, ranks[..., None]])
    is_fixed = ~is_empty & (marks.sum(2)[layers[..., None], slots] > 1)
    packing = swap_pairs(slots, sizes, _SWAP_ROUNDS, is_fixed)
    return mark_slots(packing.slots, marks.shape[1])


def _solve_nodes(load: FloatArray, cluster: Cluster, num_slots: int, part: float) -> BoolArray:
    """Return marks (L, E, R) from a two-step placement: experts on nodes, then on the ranks of each node.

    A fraction `part` of the spare slots gives the hottest experts a replica on every node, so that none of
    their copies leaves its node. All other experts are on one node, the same number on each, as in the
    hierarchical policy of DeepSeek's EPLB. Shapes: load (L, E).
    """
    num_layers, num_experts = load.shape
    num_nodes = cluster.num_nodes
    spare = cluster.num_ranks * num_slots - num_experts
    num_everywhere = min(int(part * spare) // (num_nodes - 1), num_experts)
    counts = count_for_size(load, np.full(num_layers, np.inf), num_nodes, num_nodes)
    hottest = np.argsort(-load, axis=1, kind="stable")[:, :num_everywhere]
    np.put_along_axis(counts, hottest, num_nodes, axis=1)
    packing = pack(load, counts, num_nodes, -(-int(counts.sum(1).max()) // num_nodes))
    node_slots = _fill_ranks(_swap(packing, load).slots, load)
    on_node = mark_slots(node_slots, num_experts).transpose(0, 2, 1)
    share = load / on_node.sum(1)
    slots = np.full((num_layers, num_nodes, cluster.ranks_per_node, num_slots), EMPTY)
    numbers = on_node.sum(2)
    for number in np.unique(numbers):
        layers, nodes = np.nonzero(numbers == number)
        experts = np.nonzero(on_node[layers, nodes])[1].reshape(len(layers), number)
        inner = _solve_ranks(share[layers[:, None], experts], cluster.ranks_per_node, num_slots).slots
        named = np.take_along_axis(experts, np.maximum(inner, 0).reshape(len(layers), -1), axis=1)
        slots[layers, nodes] = np.where(inner == EMPTY, EMPTY, named.reshape(inner.shape))
    return mark_slots(slots.reshape(num_layers, cluster.num_ranks, num_slots), num_experts)
