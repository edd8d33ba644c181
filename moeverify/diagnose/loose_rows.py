"""Rows that a module has in an order of its own, such as copies of tokens sorted by expert: found by their values.

One device has all N rows; a rank has some of them, in another order and of other ranks' tokens. Rows that go into a
module are matched with the golden's that have the same values, and rows that come out of it go with those. Copies of
one token are equal where they go in, so each is taken for the copy that comes out most alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from moeverify.diagnose.slices import MOST_SLICES, measure_distances, scale_rows
from moeverify.train.module_taps import Reading

_FAR = 1e6  # a distance of rows that are no numbers

Call = tuple[int, str, int]
"""A call of a module, of which there is one in a micro-batch: rank, module, micro-batch."""


@dataclass(frozen=True)
class Places:
    """Which rows of the golden's the rows of each call are; `is_shared` where other ranks have the same ones too.

    `are_sure` says of each row whether it went in as the golden's does, of which there are as many. The others have
    what was left: they may be rows that a rank computes and throws away, such as those of other ranks' experts.
    """

    of_call: Mapping[Call, tuple[int, ...]]
    is_shared: bool
    are_sure: Mapping[Call, tuple[bool, ...]] = field(default_factory=dict)


def place_rows(
    golden: Sequence[Reading], found: Sequence[tuple[int, Reading]], groups: Mapping[int, int], equal: float
) -> Places:
    """Return where the rows of one module stand among the golden's, which has one call of it.

    `golden` and `found` (with its rank) are what was read of the module forward, of one number of rows in each call;
    `groups` has for each rank the number of those that together have all tokens, such as its coordinate of tp. Rows
    are equal if they differ by less than `equal` of their norm. No call has a place where the ranks of a group have
    another number of rows than one device: some were dropped, or padded, or the module is not the same.
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
    """Return what one call took and put out beside each other, (rows, columns) float64; None without an input."""
    ordered = sorted(readings, key=_side_of)
    if not ordered or ordered[0].end != "input" or len({len(rows_of(each)) for each in ordered}) > 1:
        return None
    return torch.cat([rows_of(each).to(torch.float64) for each in ordered], dim=1)


def rows_of(reading: Reading) -> Tensor:
    """Return what was read as (rows, columns): what has as many rows as there are tokens was taken for those."""
    return reading.local.flatten(0, 1) if reading.is_flat else reading.local


def _side_of(reading: Reading) -> tuple[bool, str]:
    return reading.end != "input", reading.slot


def _num_columns(readings: Sequence[Reading]) -> int:
    return sum(reading.local.shape[-1] for reading in readings if reading.end == "input")


def _match(rows: Tensor, expected: Tensor, num_inputs: int, equal: float) -> tuple[list[int], list[bool]]:
    """Return for each row the golden's row that it is, each once; what is no copy of any gets what is left.

    With it goes whether each is sure (`Places`). Shapes: `rows` and `expected` (N, inputs and outputs).
    """
    distance = _measure(rows[:, :num_inputs], expected[:, :num_inputs])
    # Inputs first: of rows that differ by rounding the outputs decide, by less than any other input would.
    is_equal = distance <= equal
    cost = torch.where(is_equal, 0.0, 1.0 + distance)
    outputs = _measure(rows[:, num_inputs:], expected[:, num_inputs:])
    cost += 0.5 * outputs / outputs.amax().clamp(min=1e-300)
    places = torch.full((len(rows),), -1)
    free = torch.ones(len(expected), dtype=torch.bool)
    while bool((places < 0).any()):
        open_rows, open_places = (places < 0).nonzero().flatten(), free.nonzero().flatten()
        best, at = cost[open_rows][:, open_places].min(dim=1)
        # Of rows that want one place the last one written wins, which is the one that is most alike.
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
    """Return of each row whether it is the golden's row in its place, and no other one can be it, (N,).

    Among copies of a token what they become decides. `is_equal` says of which inputs are equal, and `outputs` is how
    far what came out is, (N, N) of rows and the golden's.
    """
    wanted, made = expected[:, :num_inputs], expected[:, num_inputs:]
    copies = _measure(wanted, wanted) <= equal
    is_one_of_many = copies.sum(dim=0) > 1
    copies &= (_measure(made, made) <= equal) | ~is_one_of_many
    claims = is_equal & ((outputs <= equal) | ~is_one_of_many)
    is_fair = claims.sum(dim=0) == copies.sum(dim=0)
    return is_fair[places] & claims[torch.arange(len(places)), places]


def _measure(found: Tensor, wanted: Tensor) -> Tensor:
    """Return the distance of each row from each of the golden's, as a share of its norm or of a typical one."""
    distance = measure_distances(found, wanted) / scale_rows(wanted)
    return distance.nan_to_num(nan=_FAR, posinf=_FAR).clamp(max=_FAR)
