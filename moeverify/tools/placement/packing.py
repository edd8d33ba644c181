"""Building blocks of the fast heuristic: replica counts, packing onto ranks, and balancing swaps.

All layers are processed at once, in loops over replicas whose bodies are numpy calls on all layers. Every
replica of an expert has the same load, 1/k of the expert's load, which is exact for even sources on one
node.

Notation: B layers (a batch), E experts, R ranks, S slots per rank, P slots of all ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeverify.tools.placement.marks import BoolArray
from moeverify.tools.placement.sharing import FloatArray, IntArray

EMPTY = -1
"""The expert index of an empty slot."""

_LEAST_GAIN = 1e-9  # of a pair's difference: smaller gains are rounding, and swapping for them never ends


class SlotPacking(NamedTuple):
    """The experts in all slots, int64 (B, R, S) with `EMPTY` ones, and the loads of the ranks (B, R)."""

    slots: IntArray
    loads: FloatArray


def count_replicas(load: FloatArray, num_replicas: int, most: int) -> IntArray:
    """Return replica counts (B, E) that sum to `num_replicas` and minimize the largest load of a replica.

    Each further replica goes to the expert with the largest replicas, at most `most` per expert; this
    greedy choice is optimal. If most * E < num_replicas, the sum is most * E.

    Shapes: load (B, E).
    """
    num_layers, num_experts = load.shape
    counts = np.ones((num_layers, num_experts), dtype=np.int64)
    each = load.copy()
    rows = np.arange(num_layers)
    if most == 1:
        return counts
    for _ in range(min(num_replicas, most * num_experts) - num_experts):
        experts = each.argmax(1)
        number = counts[rows, experts] + 1
        counts[rows, experts] = number
        # An expert on every rank is excluded, even if all others have no load.
        each[rows, experts] = np.where(number < most, load[rows, experts] / number, -1.0)
    return counts


def count_for_size(load: FloatArray, size: FloatArray, most: int, least_total: int) -> IntArray:
    """Return the fewest replicas (B, E) with loads of at most `size` (B), at least `least_total` per layer.

    Shapes: load (B, E); size (B), at least the largest replica of `count_replicas`.
    """
    # A size that divides a load up to rounding must not require one more replica.
    counts = np.ceil(load / np.maximum(size, 1e-300)[:, None] * (1 - 1e-12)).astype(np.int64)
    counts = np.clip(counts, 1, most)
    rows = np.arange(len(load))
    while (is_short := counts.sum(1) < least_total).any():
        experts = np.where(counts < most, load / counts, -1.0).argmax(1)
        counts[rows[is_short], experts[is_short]] += 1
    return counts


def pack(load: FloatArray, counts: IntArray, num_ranks: int, num_slots: int) -> SlotPacking:
    """Return replicas on ranks: largest first, each to the least loaded rank with a free slot.

    No rank gets two replicas of one expert. A replica without a possible rank is left out; its expert is
    already on another rank.

    Shapes: load (B, E); counts (B, E), sums at most R * S.
    """
    num_layers = len(load)
    replicas = _list_replicas(load, counts)
    each = np.concatenate([load / counts, np.zeros((num_layers, 1))], axis=1)
    sizes = np.take_along_axis(each, replicas, axis=1)
    slots = np.full((num_layers * num_ranks, num_slots), EMPTY)
    filled = np.zeros(num_layers * num_ranks, dtype=np.int64)
    loads = np.zeros((num_layers, num_ranks))
    # `order` is the load, infinite for full ranks. Replicas of one expert are consecutive, so a rank holds
    # the current expert exactly if it received it last.
    order = np.zeros((num_layers, num_ranks))
    last = np.full((num_layers, num_ranks), EMPTY)
    flat_loads, flat_order, flat_last = loads.ravel(), order.ravel(), last.ravel()
    first = np.arange(num_layers) * num_ranks
    # Columns are read one by one; contiguous copies take a third of the time.
    columns = zip(np.ascontiguousarray(replicas.T), np.ascontiguousarray(sizes.T), strict=True)
    for experts, size in columns:
        place = first + order.argmin(1)
        # A rank that just received a replica is rarely still the least loaded one.
        again = np.flatnonzero(flat_last[place] == experts)
        if again.size:
            is_barred = last[again] == experts[again, None]
            place[again] = first[again] + np.where(is_barred, np.inf, order[again]).argmin(1)
        is_open = (flat_order[place] < np.inf) & (flat_last[place] != experts) & (experts != EMPTY)
        place, given, added = place[is_open], experts[is_open], size[is_open]
        slots[place, filled[place]] = given
        filled[place] += 1
        flat_loads[place] += added
        flat_order[place] = np.where(filled[place] < num_slots, flat_loads[place], np.inf)
        flat_last[place] = given
    return SlotPacking(slots.reshape(num_layers, num_ranks, num_slots), loads)


def _list_replicas(load: FloatArray, counts: IntArray) -> IntArray:
    """Return the expert of each replica (B, P), the largest replicas first, padded with `EMPTY`."""
    num_layers = len(load)
    order = np.argsort(-load / counts, axis=1, kind="stable")
    ordered = np.take_along_axis(counts, order, axis=1)
    totals = ordered.sum(1)
    result = np.full((num_layers, int(totals.max())), EMPTY)
    result[np.arange(result.shape[1]) < totals[:, None]] = np.repeat(order.ravel(), ordered.ravel())
    return result


def swap_pairs(
    slots: IntArray, sizes: FloatArray, num_rounds: int, is_fixed: BoolArray | None = None
) -> SlotPacking:
    """Return a packing after exchanges of slots that reduce the larger load of pairs of ranks.

    In each round the heaviest rank of a layer is paired with the lightest, the next heaviest with the next
    lightest, and so on, shifted by one per round. Each pair makes its best exchange of two slots, one of
    which may be empty. The search ends early when no pair has gained for as many rounds as there are
    partners.

    Shapes: slots, sizes (the load in each slot) and is_fixed (slots that are not exchanged), all (B, R, S).
    """
    num_layers, num_ranks, num_slots = slots.shape
    num_pairs = num_ranks // 2
    # Slots first: reductions over pairs of slots then run along contiguous memory.
    experts = slots.transpose(2, 0, 1).reshape(num_slots, -1).copy()
    parts = sizes.transpose(2, 0, 1).reshape(num_slots, -1).copy()
    fixed = None if is_fixed is None else is_fixed.transpose(2, 0, 1).reshape(num_slots, -1)
    loads = parts.sum(0)
    first = (np.arange(num_layers) * num_ranks)[:, None]
    idle = 0
    for number in range(num_rounds):
        order = np.argsort(-loads.reshape(num_layers, num_ranks), axis=1, kind="stable")
        heavy = (first + order[:, :num_pairs]).ravel()
        light = (first + np.roll(order[:, ::-1][:, :num_pairs], number, axis=1)).ravel()
        gained = _swap_best(experts, parts, loads, heavy, light, fixed)
        idle = 0 if gained else idle + 1
        if idle > num_pairs:
            break
    result = experts.reshape(num_slots, num_layers, num_ranks).transpose(1, 2, 0)
    return SlotPacking(np.ascontiguousarray(result), loads.reshape(num_layers, num_ranks))


def _swap_best(
    experts: IntArray,
    sizes: FloatArray,
    loads: FloatArray,
    heavy: IntArray,
    light: IntArray,
    is_fixed: BoolArray | None,
) -> bool:
    """Exchange the two slots of each pair of ranks that balance it best; return whether any pair gained.

    Shapes: experts, sizes and is_fixed (S, B * R); loads (B * R); heavy and light (pairs).
    """
    half = (loads[heavy] - loads[light]) / 2
    is_live = half > 0
    if not is_live.any():
        return False
    heavy, light, half = heavy[is_live], light[is_live], half[is_live]
    # An exchange that moves `half` equalizes the loads; any amount between 0 and the difference helps.
    distance = np.abs(sizes[:, heavy][:, None] - sizes[:, light][None] - half)
    best = distance.reshape(-1, len(heavy)).argmin(0)
    given, taken = experts[:, heavy], experts[:, light]
    fixed = None if is_fixed is None else (is_fixed[:, heavy], is_fixed[:, light])
    # Few of the best exchanges are forbidden, and searching for all forbidden ones would dominate the time.
    pairs = np.flatnonzero(_are_barred(best, given, taken, fixed))
    if pairs.size:
        part = distance[:, :, pairs]
        part[_list_barred(pairs, given, taken, fixed)] = np.inf
        best[pairs] = part.reshape(-1, len(pairs)).argmin(0)
        distance[:, :, pairs] = part
    gains = distance.reshape(-1, len(heavy))[best, np.arange(len(heavy))] < half * (1 - _LEAST_GAIN)
    if not gains.any():
        return False
    best, heavy, light = best[gains], heavy[gains], light[gains]
    out, back = best // len(sizes), best % len(sizes)
    for array in (experts, sizes):
        array[out, heavy], array[back, light] = array[back, light], array[out, heavy]
    for ranks in (heavy, light):
        loads[ranks] = sizes[:, ranks].sum(0)
    return True


def _are_barred(
    best: IntArray, given: IntArray, taken: IntArray, fixed: tuple[BoolArray, BoolArray] | None
) -> BoolArray:
    """Return whether the best exchange of each pair of ranks would duplicate an expert on one of them.

    Shapes: best (pairs), the index among the S * S exchanges; given, taken and both of fixed (S, pairs).
    """
    columns = np.arange(len(best))
    out, back = best // len(given), best % len(given)
    first, second = given[out, columns], taken[back, columns]
    result: BoolArray = ((taken == first).any(0) & (first != EMPTY)) | (
        (given == second).any(0) & (second != EMPTY)
    )
    if fixed is not None:
        result |= fixed[0][out, columns] | fixed[1][back, columns]
    return result


def _list_barred(
    pairs: IntArray, given: IntArray, taken: IntArray, fixed: tuple[BoolArray, BoolArray] | None
) -> BoolArray:
    """Return the exchanges (S, S, pairs) that duplicate an expert on a rank, for some of the pairs."""
    given, taken = given[:, pairs], taken[:, pairs]
    is_same = (given[:, None] == taken[None]) & (given != EMPTY)[:, None]
    # Equal experts in both slots are included; exchanging them gains nothing.
    result: BoolArray = is_same.any(1)[:, None] | is_same.any(0)[None]
    if fixed is not None:
        result |= fixed[0][:, pairs][:, None] | fixed[1][:, pairs][None]
    return result


def count_slots(slots: IntArray, num_experts: int) -> IntArray:
    """Return the number of replicas of each expert (B, E) in slots (B, R, S)."""
    num_layers = len(slots)
    # Column 0 counts the empty slots.
    index = slots.reshape(num_layers, -1) + 1 + np.arange(num_layers)[:, None] * (num_experts + 1)
    counts = np.bincount(index.ravel(), minlength=num_layers * (num_experts + 1))
    return counts.reshape(num_layers, -1)[:, 1:].astype(np.int64)


def fill_slots(packing: SlotPacking, load: FloatArray) -> SlotPacking:
    """Return a packing with replicas in its empty slots, as far as no layer's largest load increases.

    A replica keeps the copies of its own rank local. The most loaded expert that fits is therefore chosen,
    for the lightest rank first.

    Shapes: load (B, E).
    """
    slots, loads = packing.slots.copy(), packing.loads.copy()
    num_experts = load.shape[1]
    counts = count_slots(slots, num_experts)
    limit = loads.max(1)
    free = (slots == EMPTY).sum(2)
    order = np.where(free > 0, loads, np.inf)
    while (rows := np.flatnonzero(np.isfinite(order.min(1)))).size:
        ranks = order[rows].argmin(1)
        held = slots[rows, ranks]
        size = load[rows] / (counts[rows] + 1)
        fits = size <= (limit[rows] - loads[rows, ranks])[:, None]
        fits[np.nonzero(held != EMPTY)[0], held[held != EMPTY]] = False
        experts = np.where(fits, load[rows], -1.0).argmax(1)
        has_one = fits[np.arange(len(rows)), experts]
        order[rows[~has_one], ranks[~has_one]] = np.inf
        rows, ranks, experts = rows[has_one], ranks[has_one], experts[has_one]
        if not rows.size:
            continue
        # The load of the new replica is taken from the others.
        number = counts[rows, experts]
        which, others, _ = np.nonzero(slots[rows] == experts[:, None, None])
        loads[rows[which], others] -= (load[rows, experts] / (number * (number + 1)))[which]
        loads[rows, ranks] += load[rows, experts] / (number + 1)
        counts[rows, experts] += 1
        slots[rows, ranks, (slots[rows, ranks] == EMPTY).argmax(1)] = experts
        free[rows, ranks] -= 1
        order[rows] = np.where(np.isfinite(order[rows]) & (free[rows] > 0), loads[rows], np.inf)
    return SlotPacking(slots, loads)
