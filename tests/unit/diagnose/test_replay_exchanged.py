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
            run_expert(value, taker) if (taker := serve(rank, place, owner)) >= 0 else torch.zeros_like(value)
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


def list_counts() -> Tensor:
    """Return how many rows each rank sends to each expert, (2, experts)."""
    experts = make_experts()
    ids = experts.ids.flatten(0, 1)
    return torch.stack([torch.bincount(ids[tokens].flatten(), minlength=experts.count) for tokens in CALL])


COUNTS: list[tuple[str, int, Callable[[Tensor, int], list[int]]]] = [
    ("as-next", 0, lambda sent, rank: [own(sent, rank)[1], *own(sent, rank)[1:]]),
    ("as-before", 1, lambda sent, rank: [own(sent, rank)[0], own(sent, rank)[0], *own(sent, rank)[2:]]),
    ("starts", 0, lambda sent, rank: [0, *own(sent, rank)[:-1]]),
    ("running", 0, lambda sent, rank: torch.tensor(own(sent, rank)).cumsum(0).tolist()),
    ("equal", 0, lambda sent, rank: [sum(own(sent, rank)) // len(own(sent, rank))] * len(own(sent, rank))),
    ("padded", 4, lambda sent, rank: [-(-count // 4) * 4 for count in own(sent, rank)]),
    ("floored", 4, lambda sent, rank: [count // 4 * 4 for count in own(sent, rank)]),
    ("of-rank", 1, lambda sent, rank: own(sent, 1 - rank)),
    ("first-rank", 0, lambda sent, rank: own(sent, 0)),
    ("own-alone", 0, lambda sent, rank: sent[rank].view(2, -1)[rank].tolist()),
    ("from-rank", 1, lambda sent, rank: sent[1].view(2, -1)[rank].tolist()),
    ("sent-first", 0, lambda sent, rank: sent[rank].view(2, -1)[0].tolist()),
    ("none", 1, lambda sent, rank: [n * (at != 1) for at, n in enumerate(own(sent, rank))]),
]


def own(sent: Tensor, rank: int) -> list[int]:
    """Return the rows of each expert of a rank."""
    return sent.sum(0).view(2, -1)[rank].tolist()  # type: ignore[no-any-return]


def misserve(taken: Callable[[Tensor, int], list[int]]) -> Tensor:
    """Return what two ranks combine whose experts take other counts of rows, and zeros for rows that none takes."""
    sent, half = list_counts(), make_experts().count // 2

    def serve(rank: int, place: int, expert: int) -> int:
        del expert
        ends = torch.tensor(taken(sent, rank)).cumsum(0)
        local = int((ends <= place).sum())
        return rank * half + local if local < half else -1

    return exchange(serve=serve)


@pytest.mark.parametrize(("way", "number", "taken"), COUNTS, ids=[way for way, _, _ in COUNTS])
def test_rows_by_other_counts(way: str, number: int, taken: Callable[[Tensor, int], list[int]]) -> None:
    right, wrong = exchange(), misserve(taken)
    assert not torch.allclose(right, wrong)
    found = explain(make_experts(), right, wrong)
    assert found is not None
    named = [(change.way, int(change.number or 0)) for changes in found.variants for change in changes]
    assert (way, number) in named
    assert len(found.variants) <= 3


def test_counts_that_are_none_of_the_grammars_are_not_named() -> None:
    """Each rank's second expert gets three rows of the first one's, and the last one loses two."""
    right = exchange()
    wrong = misserve(
        lambda sent, rank: [own(sent, rank)[0] - 3, own(sent, rank)[1] + 1, *own(sent, rank)[2:]]
    )
    found = explain(make_experts(), right, wrong)
    assert not torch.allclose(right, wrong)
    assert found is None or not found.variants


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


@torch.no_grad()
def test_a_sum_over_ranks_of_different_tokens() -> None:
    experts = make_experts()
    half, actual = experts.count // 2, torch.zeros_like(experts.x)
    for place in range(LENGTH):
        for rank in range(2):  # whose experts compute its own row alone, for both
            for expert, weight in zip(experts.ids[rank, place], experts.weights[rank, place], strict=True):
                if int(expert) // half == rank:
                    actual[:, place] += weight * run_expert(experts.x[rank, place], int(expert))
    found = explain(experts, compute(run_expert), actual)
    assert name_changes(found) == [[("sum-over-ep", "of-other-tokens")]]
