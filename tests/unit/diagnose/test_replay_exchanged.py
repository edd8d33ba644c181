"""Replays of experts: rows that are read elsewhere, counts of others, and experts that ranks should not hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from replays import CALL, LENGTH, ROWS, name_changes
from test_replay_experts import explain, make_experts, run_expert, travel
from torch import Tensor

Rows = list[tuple[int, int]]  # copy, expert
Order = Callable[[list[int]], list[int]]
Serve = Callable[[int, int, int], int]  # rank, place among its rows, expert: the expert that computes


def same(order: list[int]) -> list[int]:
    return order


def shift(order: list[int]) -> list[int]:
    return [(row + 1) % len(order) for row in order]


def delay_blocks(order: list[int]) -> list[int]:
    """Return where each row is read if blocks, which move by one offset each, begin one row late."""
    offsets = [row - place for place, row in enumerate(order)]
    return [(place + offsets[place - 1]) % len(order) for place in range(len(order))]


@torch.no_grad()
def exchange(
    there: Order = same, back: Order = same, serve: Serve = lambda rank, place, expert: expert
) -> Tensor:
    """Return what two ranks with half of the experts combine, where rows are sorted from other places."""
    experts = make_experts()
    ids, weights = experts.ids.flatten(0, 1), experts.weights.flatten(0, 1)
    x, half, k = experts.x.flatten(0, 1), experts.count // 2, experts.num_choices
    out = torch.zeros_like(x)
    for rank in range(2):
        rows: Rows = []
        for tokens in CALL:
            sent = [(int(t) * k + c, int(ids[t, c])) for t in tokens for c in range(k)]
            rows += sorted((row for row in sent if row[1] // half == rank), key=lambda row: row[1])
        order = sorted(range(len(rows)), key=lambda place: rows[place][1])
        inverse = [order.index(place) for place in range(len(rows))]
        owners = [rows[place][1] for place in order]
        given = [x[rows[place][0] // k] for place in there(order)]
        computed = [
            run_expert(value, serve(rank, place, owner))
            for place, (value, owner) in enumerate(zip(given, owners, strict=True))
        ]
        for (copy, _), place in zip(rows, back(inverse), strict=True):
            out[copy // k] += weights[copy // k, copy % k] * computed[place]
    return out.view_as(experts.x)


def test_the_exchange_that_is_written_out_once_more_is_the_other_one() -> None:
    assert torch.allclose(exchange(), travel({}), atol=1e-12)


@pytest.mark.parametrize(
    ("there", "back", "change"),
    [
        (shift, shift, ("there-and-back", "addresses")),
        (delay_blocks, same, ("there", "blocks")),
        (same, delay_blocks, ("back", "blocks")),
    ],
)
def test_rows_that_are_sorted_from_other_places(there: Order, back: Order, change: tuple[str, str]) -> None:
    found = explain(make_experts(), exchange(), exchange(there, back))
    assert [change] in (name_changes(found) or [])


def test_rows_by_rank_that_are_taken_for_rows_by_expert() -> None:
    # Four ranks would be needed for as many ranks as experts of one: two counts serve the first two experts.
    experts = make_experts()
    half = experts.count // 2
    owner = (experts.ids // half).flatten(0, 1)
    counts = [[int((owner[tokens] == rank).sum()) for tokens in CALL] for rank in range(2)]
    wrong = exchange(serve=lambda rank, place, expert: rank * half + int(place >= counts[rank][0]))
    assert name_changes(explain(experts, exchange(), wrong)) == [[("counts", "by-rank")]]


def compute(run: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return what a token's experts combine if each is computed so."""
    experts = make_experts()
    with torch.no_grad():
        values = [
            sum(w * run(x, int(e)) for e, w in zip(ids, weights, strict=True))
            for x, ids, weights in zip(
                experts.x.flatten(0, 1), experts.ids.flatten(0, 1), experts.weights.flatten(0, 1), strict=True
            )
        ]
    return torch.stack(values).view(ROWS, LENGTH, -1)


def test_slices_of_units_in_the_place_of_experts() -> None:
    experts = make_experts()
    half, width = experts.count // 2, experts.held.gate.shape[1]
    part = torch.arange(width) // (width // 2)

    def run(x: Tensor, expert: int) -> Tensor:
        return run_expert(x, expert % half, (part == expert // half).to(x.dtype))

    found = explain(experts, compute(run_expert), compute(run))
    assert name_changes(found) == [[("experts", "by-units")]]


@pytest.mark.parametrize("name", ["gate", "up", "down", "down_bias"])
@pytest.mark.parametrize("way", ["first-rank", "of-rank"])
def test_one_parameter_of_experts_that_a_rank_should_not_hold(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, expected = make_experts(), compute(run_expert)
    half, held, places = experts.count // 2, experts.held, torch.arange(experts.count)
    others = places % half if way == "first-rank" else (places + half) % experts.count
    with monkeypatch.context() as within:
        within.setattr(experts, "held", held._replace(**{name: getattr(held, name)[others]}))
        actual = compute(run_expert)
    found = explain(experts, expected, actual)
    assert name_changes(found) == [[(f"{name.replace('_', '-')}-held", way)]]
