"""Rows in a module's own order, such as copies of tokens sorted by expert, matched by their values.

The single device has all N rows. A rank has some of them, in another order and from other ranks' tokens.
Input rows of a module are matched with golden rows of equal values, and output rows go with them. Copies of
one token have equal inputs, so each is matched with the copy whose output is closest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from moeverify.explain.fitting.slices import MOST_SLICES, measure_distances, scale_rows
from moeverify.train.module_taps import Reading

_FAR = 1e6  # distance of rows that are not finite

Call = tuple[int, str, int]
"""Call of a module, one in each micro-batch: (rank, module, micro-batch)."""


@dataclass(frozen=True)
class Places:
    """Golden rows of the rows of each call; `is_shared` is true if other ranks have the same rows too.

    `are_sure` tells for each row whether its input equals the golden's, with an equal number of copies.
    Other rows get the remaining places: a rank may compute and discard them, such as rows of other ranks'
    experts.
    """

    of_call: Mapping[Call, tuple[int, ...]]
    is_shared: bool
    are_sure: Mapping[Call, tuple[bool, ...]] = field(default_factory=dict)


def place_rows(
    golden: Sequence[Reading], found: Sequence[tuple[int, Reading]], groups: Mapping[int, int], equal: float
) -> Places:
    """Match the rows of one module's calls with the rows of its one golden call.

    `golden` and `found` (with ranks) are forward readings of the module, with one number of rows in each
    call. `groups` maps each rank to a group that together has all tokens, such as its tp coordinate. Rows
    are equal if they differ by less than `equal` of their norm.

    No call has a place if a group's number of rows differs from the single device: rows were dropped or
    padded, or the module is another one.
    """
    nowhere = Places({}, is_shared=False)
    expected = _join(golden)
    if expected is None or len(expected) > MOST_SLICES:
        return nowhere
    calls: dict[Call, Tensor] = {}
    for call, readings in _list_calls(found):
        joined = _join(readings)
        if joined is None or joined.shape[1] != expected.shape[1]:
            return nowhere
        calls[call] = joined
    for is_shared in (False, True):
        together: dict[int, list[Call]] = {}
        for call in calls:
            together.setdefault(call[0] if is_shared else groups.get(call[0], 0), []).append(call)
        placed, are_sure = {}, {}
        for members in together.values():
            rows = torch.cat([calls[call] for call in members])
            if len(rows) != len(expected):
                break
            places, sure = _match(rows, expected, _num_columns(golden), equal)
            for call in members:
                size = len(calls[call])
                placed[call], places = tuple(places[:size]), places[size:]
                are_sure[call], sure = tuple(sure[:size]), sure[size:]
        else:
            return Places(placed, is_shared and len(together) > 1, are_sure)
    return nowhere


def _list_calls(found: Sequence[tuple[int, Reading]]) -> Iterator[tuple[Call, list[Reading]]]:
    def call_of(each: tuple[int, Reading]) -> Call:
        rank, reading = each
        return rank, reading.module, reading.micro_batch

    for call, members in groupby(sorted(found, key=call_of), key=call_of):
        yield call, [reading for _, reading in members]


def _join(readings: Sequence[Reading]) -> Tensor | None:
    """Return the inputs and outputs of one call, (rows, columns) float64; None without an input."""
    ordered = sorted(readings, key=_side_of)
    if not ordered or ordered[0].end != "input" or len({len(rows_of(each)) for each in ordered}) > 1:
        return None
    return torch.cat([rows_of(each).to(torch.float64) for each in ordered], dim=1)


def rows_of(reading: Reading) -> Tensor:
    """Return a reading as (rows, columns); readings that were viewed as tokens are flattened."""
    return reading.local.flatten(0, 1) if reading.is_flat else reading.local


def _side_of(reading: Reading) -> tuple[bool, str]:
    return reading.end != "input", reading.slot


def _num_columns(readings: Sequence[Reading]) -> int:
    return sum(reading.local.shape[-1] for reading in readings if reading.end == "input")


def _match(rows: Tensor, expected: Tensor, num_inputs: int, equal: float) -> tuple[list[int], list[bool]]:
    """Return a distinct golden row for each row, and whether each is sure (`Places`).

    Rows without a copy among the golden's get the remaining places. Shapes: `rows` and `expected` are (N,
    input and output columns).
    """
    distance = _measure(rows[:, :num_inputs], expected[:, :num_inputs])
    # Match by inputs first. Among equal inputs the outputs decide; they weigh less than any difference of
    # inputs.
    is_equal = distance <= equal
    cost = torch.where(is_equal, 0.0, 1.0 + distance)
    outputs = _measure(rows[:, num_inputs:], expected[:, num_inputs:])
    cost += 0.5 * outputs / outputs.amax().clamp(min=1e-300)
    places = torch.full((len(rows),), -1)
    free = torch.ones(len(expected), dtype=torch.bool)
    while bool((places < 0).any()):
        open_rows, open_places = (places < 0).nonzero().flatten(), free.nonzero().flatten()
        best, at = cost[open_rows][:, open_places].min(dim=1)
        # If several rows want one place, the last write wins; sort so that this is the closest row.
        order = best.argsort(descending=True, stable=True)
        winner = torch.full((len(open_places),), -1)
        winner[at[order]] = open_rows[order]
        taken = winner >= 0
        places[winner[taken]] = open_places[taken]
        free[open_places[taken]] = False
    are_sure = _is_sure(places, expected, num_inputs, is_equal, outputs, equal)
    return [int(place) for place in places], [bool(sure) for sure in are_sure]


def _is_sure(
    places: Tensor, expected: Tensor, num_inputs: int, is_equal: Tensor, outputs: Tensor, equal: float
) -> Tensor:
    """Return whether each row is certainly the golden row in its place, bool (N,).

    Outputs distinguish the copies of a token. `is_equal` (N, N) tells which inputs of rows and golden rows
    are equal, and `outputs` (N, N) has the distances of their outputs.
    """
    wanted, made = expected[:, :num_inputs], expected[:, num_inputs:]
    copies = _measure(wanted, wanted) <= equal
    is_one_of_many = copies.sum(dim=0) > 1
    copies &= (_measure(made, made) <= equal) | ~is_one_of_many
    claims = is_equal & ((outputs <= equal) | ~is_one_of_many)
    is_fair = claims.sum(dim=0) == copies.sum(dim=0)
    return is_fair[places] & claims[torch.arange(len(places)), places]


def _measure(found: Tensor, wanted: Tensor) -> Tensor:
    """Return the distance of each row from each golden row, relative to its norm or to a typical norm."""
    distance = measure_distances(found, wanted) / scale_rows(wanted)
    return distance.nan_to_num(nan=_FAR, posinf=_FAR).clamp(max=_FAR)
