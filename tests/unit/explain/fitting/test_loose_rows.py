"""Rows in a module's own order: two ranks have the rows of one device, each in its own order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from wrong_tensors import draw

from moeverify.explain.fitting.first_divergence import Search, find_origins
from moeverify.explain.fitting.loose_rows import place_rows
from moeverify.explain.fitting.rank_readings import RankReadings
from moeverify.train.module_taps import Reading, Tap

NUM_TOKENS, WIDTH = 6, 4
ROWS = [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]  # tokens whose copies the experts take, ten of them
OF_RANKS = [[9, 1, 2, 6, 4], [3, 0, 5, 8, 7]]  # the rows of each rank, in its order
Alter = Callable[[int, Tensor], Tensor]


def read_experts(
    rows: Tensor, results: Tensor, gradients: Tensor | None = None, order: int = 0
) -> list[Reading]:
    """Return the reading of a module `moe.experts` that turns some rows into others."""
    made = [
        Reading("forward", order, "moe.experts", "input", 0, rows, is_loose=True),
        Reading("forward", order + 1, "moe.experts", "output", 0, results, is_loose=True),
    ]
    if gradients is not None:
        made.append(Reading("backward", order, "moe.experts", "input", 0, gradients, is_loose=True))
    return made


def read_golden() -> tuple[list[Reading], Tensor, Tensor, Tensor]:
    rows, results, gradients = draw(NUM_TOKENS, WIDTH)[ROWS], draw(10, WIDTH, seed=2), draw(10, WIDTH, seed=3)
    tokens = Reading("forward", 2, "moe", "output", 0, draw(2, 3, WIDTH, seed=4))
    return [*read_experts(rows, results, gradients), tokens], rows, results, gradients


def search(
    *,
    takes: Alter = lambda rank, rows: rows,
    returns: Alter = lambda rank, rows: rows,
    passes_back: Alter = lambda rank, rows: rows,
    adds_up: float = 1.0,
) -> Search:
    """Return the finding when two ranks deviate from one device; each has one row of the batch."""
    golden, rows, results, gradients = read_golden()
    by_rank = []
    for rank, own in enumerate(OF_RANKS):
        readings = read_experts(
            takes(rank, rows[own]), returns(rank, results[own]), passes_back(rank, gradients[own])
        )
        tokens = golden[-1].local[rank : rank + 1] * (adds_up if rank else 1.0)
        by_rank.append(
            RankReadings([*readings, replace(golden[-1], local=tokens)], [(range(rank, rank + 1), range(3))])
        )
    return find_origins(golden, by_rank, {0: {}, 1: {}}, 1, torch.float64)


def test_right_rows_in_any_order_are_right() -> None:
    found = search()
    assert not found.origins
    assert found.num_right == {"forward": 3, "backward": 1}


def test_copies_of_a_token_are_told_by_what_they_become() -> None:
    golden, rows, results, _ = read_golden()
    found = [
        (rank, reading)
        for rank, own in enumerate(OF_RANKS)
        for reading in read_experts(rows[own], results[own])
    ]
    places = place_rows(golden[:2], found, {}, 1e-9)
    assert [list(places.of_call[rank, "moe.experts", 0]) for rank in (0, 1)] == OF_RANKS
    assert not places.is_shared


def test_rows_that_are_not_those_of_one_device_came_so_into_the_module() -> None:
    def lose(rank: int, rows: Tensor) -> Tensor:
        return torch.cat([rows[:-2], torch.zeros(2, WIDTH, dtype=rows.dtype)]) if rank == 1 else rows

    origin = search(takes=lose, returns=lose, adds_up=0.5).origins["forward"]
    assert (origin.module, origin.end, origin.culprit) == ("moe.experts", "input", "moe")
    assert (origin.num_wrong, origin.num_tokens, origin.are_rows, origin.ranks) == (2, 10, True, (1,))


def test_a_module_that_makes_something_else_of_right_rows_is_the_culprit() -> None:
    def turn(rank: int, rows: Tensor) -> Tensor:
        return rows.flip(0) if rank == 0 else rows

    origin = search(returns=turn, adds_up=0.5).origins["forward"]
    assert (origin.culprit, origin.end, origin.inputs_seen) == ("moe.experts", "output", True)
    assert (origin.num_wrong, origin.ranks) == (4, (0,))  # the middle one stays in place


def test_right_rows_that_are_put_together_otherwise_are_said_to_be_right() -> None:
    origin = search(adds_up=0.5).origins["forward"]
    assert (origin.culprit, origin.inside) == ("moe", ("moe.experts",))
    assert (origin.num_wrong, origin.num_tokens, origin.are_rows) == (3, 6, False)


@pytest.mark.parametrize(("num_wrong", "inside"), [(0, ("moe.gate", "moe.experts.*")), (1, ())])
def test_right_modules_of_a_list_are_named_together(num_wrong: int, inside: tuple[str, ...]) -> None:
    def read(factors: list[float], output: float) -> list[Reading]:
        made = [
            Reading("forward", number, f"moe.{name}", "output", 0, factor * draw(1, 3, 4, seed=number))
            for number, (name, factor) in enumerate(
                zip(["gate", *(f"experts.{n}" for n in range(6))], factors, strict=True)
            )
        ]
        return [*made, Reading("forward", 7, "moe", "output", 0, output * draw(1, 3, 4, seed=7))]

    factors = [1.0] * (7 - num_wrong) + [2.0] * num_wrong
    ranks = [RankReadings(read(factors, 2.0), [(range(1), range(3))])]
    origin = find_origins(read([1.0] * 7, 1.0), ranks, {0: {}}, 1, torch.float64).origins["forward"]
    assert origin.inside == inside


def test_gradients_of_rows_go_with_the_rows() -> None:
    origin = search(passes_back=lambda rank, rows: rows * (1.0 + rank)).origins["backward"]
    assert (origin.module, origin.end, origin.ranks) == ("moe.experts", "input", (1,))


def test_values_that_are_no_numbers_are_wrong_and_hide_no_others() -> None:
    def spoil(rank: int, rows: Tensor) -> Tensor:
        return rows.index_fill(0, torch.tensor(0), float("nan")) if rank == 0 else rows

    origin = search(returns=spoil, adds_up=0.5).origins["forward"]
    assert (origin.culprit, origin.num_wrong) == ("moe.experts", 1)


@pytest.mark.parametrize("num_missing", [1, -1])
def test_another_number_of_rows_is_not_compared(num_missing: int) -> None:
    def change(rank: int, rows: Tensor) -> Tensor:
        return rows[num_missing:] if num_missing > 0 else torch.cat([rows, rows[:1]])

    found = search(takes=change, returns=change, passes_back=change, adds_up=0.5)
    assert found.origins["forward"].culprit == "moe"
    assert found.origins["forward"].inside == ()


def test_rows_that_every_rank_has_are_compared_forward_alone() -> None:
    """As for the embedding of positions, (positions, width): its gradient is a sum over the ranks."""
    golden, rows, results, gradients = read_golden()
    by_rank = [
        RankReadings(read_experts(rows, results, 0.5 * gradients), [(range(rank, rank + 1), range(3))])
        for rank in (0, 1)
    ]
    found = find_origins(golden, by_rank, {0: {}, 1: {}}, 1, torch.float64)
    assert not found.origins
    assert found.num_right == {"forward": 2, "backward": 0}


@pytest.mark.parametrize("garbage", ["another row", "a copy of an own one"])
def test_gradients_of_rows_that_a_rank_throws_away_are_not_compared(garbage: str) -> None:
    """Each rank of tp computes the rows of all experts, and multiplies those of the other rank's by zero."""
    golden, rows, results, gradients = read_golden()
    by_rank = []
    for rank, own in enumerate(OF_RANKS):
        others = [row for row in range(len(ROWS)) if row not in own]
        takes, returns, passed = rows.clone(), results.clone(), gradients.clone()
        passed[others] = 0.0
        if garbage == "another row":
            takes[others], returns[others] = draw(5, WIDTH, seed=7), draw(5, WIDTH, seed=8)
        else:  # their outputs are equal, so that nothing distinguishes the two
            takes[others], returns[others] = rows[own], results[own]
        tokens = golden[-1].local[rank : rank + 1]
        readings = [*read_experts(takes, returns, passed), replace(golden[-1], local=tokens)]
        by_rank.append(RankReadings(readings, [(range(rank, rank + 1), range(3))]))
    places = {0: {"tp": 0}, 1: {"tp": 1}}
    assert not find_origins(golden, by_rank, places, 2, torch.float64).origins


class TopOne(nn.Module):
    """A module that turns tokens into rows, sorts them by a number, and restores their order."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        made = self.experts(x.flatten(0, 1)[rows])
        return torch.zeros_like(x).flatten(0, 1).index_add(0, torch.tensor(rows), made).view_as(x)


@pytest.mark.parametrize("reads_loose", [False, True])
def test_a_tap_reads_loose_rows_where_it_is_asked_to(*, reads_loose: bool) -> None:
    model = TopOne().double()
    tap = Tap(model, 2, 3, scale=1.0, limit=1 << 20, reads_loose=reads_loose)
    with tap.reading():
        model(draw(2, 3, WIDTH), ROWS).sum().backward()
    loose = [(each.direction, each.end) for each in tap.readings if each.is_loose]
    ends = [("forward", "input"), ("forward", "output"), ("backward", "output")]
    assert loose == (ends if reads_loose else [])


def test_rows_as_many_as_there_are_tokens_are_taken_for_rows_where_a_rank_has_another_number() -> None:
    """A mixture that sends each token to one expert: one device has as many rows as tokens."""
    golden, rows, results, _ = read_golden()
    flat = [
        replace(each, local=values[:6].view(2, 3, WIDTH), is_loose=False, is_flat=True)
        for each, values in zip(golden[:2], (rows, results), strict=True)
    ]
    own = [[5, 3], [2, 0, 4, 1]]
    by_rank = [
        RankReadings(read_experts(rows[some], factor * results[some]), [(range(rank, rank + 1), range(3))])
        for rank, (some, factor) in enumerate(zip(own, (1.0, 1.5), strict=True))
    ]
    origin = find_origins(flat, by_rank, {0: {}, 1: {}}, 1, torch.float64).origins["forward"]
    assert (origin.culprit, origin.ranks, origin.num_wrong) == ("moe.experts", (1,), 4)
