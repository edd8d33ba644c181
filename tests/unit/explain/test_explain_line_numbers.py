"""Lines that compute other numbers than on one device, and the values that moves take from them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from recordings import list_ops, make, record_call
from torch import Tensor

from moeverify.explain.agreement import Agreement
from moeverify.explain.align import Alignment
from moeverify.explain.content import has_same_numbers
from moeverify.explain.counterparts import OneDevice
from moeverify.explain.culprits import Culprits
from moeverify.explain.cuts import list_cuts
from moeverify.explain.explain import Explainer
from moeverify.explain.joint import Joint
from moeverify.explain.program import Program
from moeverify.results.cause import Cause
from moeverify.results.culprit import Culprit

Run = Callable[[int, Tensor], Tensor]
"""Function of the rank, -1 for one device, and the input."""


def record(run: Run, rank: int, x: Tensor) -> Program:
    return record_call(lambda x: run(rank, x), x=x)


def align(run: Run, x: Tensor) -> tuple[Alignment, Program]:
    ranks, one = record(run, 0, x), record(run, -1, x)
    return Alignment(Joint([ranks]), one), ranks


def find_culprit(run: Run, x: Tensor) -> Culprit:
    explainer = Explainer([record(run, 0, x)], record(run, -1, x), 0, [])
    cause, *_ = explainer.explain(30.0)
    culprits = Culprits(explainer)
    return culprits.trace(culprits.make(cause), cause)


def expression_of(culprit: Culprit) -> str:
    assert culprit.here.line is not None
    return culprit.here.line.expression


def list_origins(culprit: Culprit) -> list[tuple[str, str]]:
    return [(each.kind, each.line.expression) for each in culprit.origins]


def list_shown(culprit: Culprit) -> list[str]:
    moves = [each.line.expression for each in culprit.moves if each.line is not None]
    return moves + [expression for _, expression in list_origins(culprit)]


@pytest.mark.parametrize(
    ("ones", "others", "same", "same_counts"),
    [
        ([1.5, 2.5, 0.0], [2.5, 1.5], True, True),
        ([1.5, 1.5, 2.5, 2.5], [2.5, 1.5], True, True),  # two replicas
        ([1.5, 2.5, 2.5], [2.5, 1.5], True, False),
        ([1.5, 2.5 + 1e-12], [2.5, 1.5], True, True),
        ([1.5, 2.501], [2.5, 1.5], False, False),
        ([1.5], [2.5, 1.5], False, False),
        ([0.0], [2.5], False, False),
    ],
)
def test_numbers_are_compared_in_any_order(
    ones: list[float], others: list[float], same: bool, same_counts: bool
) -> None:
    sides = [[torch.tensor(each, dtype=torch.float64)] for each in (ones, others)]
    assert has_same_numbers(*sides) is same
    assert has_same_numbers(*sides, counts=True) is same_counts


def test_zeros_among_numbers_are_no_difference() -> None:
    def run(rank: int, x: Tensor) -> Tensor:
        kept = x.relu()
        return kept.sin() * 3.0 if rank < 0 else kept.sin() * 2.0

    alignment, ranks = align(run, make(6, 5))
    (relu,) = list_ops(ranks, "relu")
    assert alignment.is_right((0, relu.results[0]))


def step(rank: int, x: Tensor, mask: Tensor) -> Tensor:
    update = x.sin() + 0.5 * mask * x
    first, second = update.reshape(-1)[:12], update.reshape(-1)[12:]
    return torch.cat([second, first]).reshape(x.shape).cos()


def test_a_move_passes_on_the_result_of_a_line_that_returns_another_lines_numbers() -> None:
    def run(rank: int, x: Tensor) -> Tensor:
        return step(rank, x, torch.full_like(x, float(rank < 0)))

    alignment, ranks = align(run, make(6, 4))
    (joined,) = list_ops(ranks, "cat")
    known = alignment.find((0, joined.results[0]))
    assert known is not None  # x.sin(), as the mask is zero
    assert alignment.is_wrong((0, joined.results[0]))
    culprit = find_culprit(run, make(6, 4))
    assert expression_of(culprit) in ("0.5 * mask * x", "x.sin() + 0.5 * mask * x")
    assert culprit.made is not None
    assert culprit.made.line is not None
    assert culprit.made.line.expression == "torch.full_like(x, float(rank < 0))"


def look_up(wrong: list[int]) -> Run:
    """Return a function that looks rows up, on ranks those with wrong ids."""
    table = make(7, 4, seed=3)
    ids = torch.tensor([0, 1, 2, 3, 4, 5, 6, 1, 2])

    def run(rank: int, x: Tensor) -> Tensor:
        taken = ids if rank < 0 else ids + (torch.tensor(wrong) - ids)
        return (x @ torch.nn.functional.embedding(taken, table).T).tanh()

    return run


@pytest.mark.parametrize("wrong", [[0, 1, 2, 3, 4, 5, 5, 1, 2], [0, 1, 2, 3, 4, 5, 6, 2, 2]])
def test_rows_of_a_table_that_wrong_ids_take_are_wrong(wrong: list[int]) -> None:
    alignment, ranks = align(look_up(wrong), make(6, 4))
    assert alignment.is_wrong((0, list_ops(ranks, "embedding")[0].results[0]))


def test_wrong_ids_are_traced_to_the_line_that_computes_them() -> None:
    culprit = find_culprit(look_up([0, 1, 2, 3, 4, 5, 5, 1, 2]), make(6, 4))
    assert expression_of(culprit) == "torch.nn.functional.embedding(taken, table)"
    assert any("torch.tensor(wrong)" in expression for expression in list_shown(culprit))


def test_a_part_of_a_sum_is_not_blamed_for_another_part() -> None:
    def run(rank: int, x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for rows in (x[:3], x[3:]) if rank >= 0 else (x,):
            biased = rows + (0.3 if rank >= 0 and len(rows) == 3 and bool((rows == x[3:]).all()) else 0.1)
            total = total + (biased.sin() * biased).sum()
        return total

    alignment, ranks = align(run, make(6, 4))
    first, second = list_ops(ranks, "sum")
    assert alignment.find((0, first.results[0])) is None
    assert not alignment.is_wrong((0, first.results[0]))
    assert alignment.is_wrong((0, second.results[0]))


def test_draws_that_one_device_does_not_make_are_named() -> None:
    def shuffle(generator: torch.Generator) -> None:
        torch.rand(2, generator=generator)

    def run(rank: int, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(4)
        if rank >= 0:
            shuffle(generator)
        noise = torch.rand(x.shape, generator=generator, dtype=torch.float64)
        return (x + noise).sin()

    assert ("draw", "torch.rand(2, generator=generator)") in list_origins(find_culprit(run, make(4, 3)))


def test_ranks_that_all_hold_one_block_do_not_agree_with_one_device() -> None:
    whole = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)

    def run(rank: int, x: Tensor) -> Tensor:
        mask = whole if rank < 0 else whole[2 * (rank % 2) :][:2]
        return x[: len(mask)] * mask.clone()

    def agrees(ranks: tuple[int, ...]) -> list[bool]:
        programs, one = [record(run, rank, make(4)) for rank in ranks], record(run, -1, make(4))
        alignment = Alignment(Joint(programs), one)
        agreement = Agreement(alignment, OneDevice(one, alignment.elements))
        return [
            agreement.agrees((at, list_ops(program, "clone")[0].results[0]))
            for at, program in enumerate(programs)
        ]

    assert agrees((0, 1)) == [True, True]
    assert agrees((0, 2)) == [False, False]


def test_zeros_do_not_add_up_to_a_larger_value() -> None:
    def run(rank: int, x: Tensor) -> Tensor:
        mask = torch.full((4 if rank < 0 else 2,), float(rank < 0), dtype=torch.float64)
        return x[: len(mask)] * mask.clone()

    ranks, one = record(run, 0, make(4)), record(run, -1, make(4))
    alignment = Alignment(Joint([ranks]), one)
    agreement = Agreement(alignment, OneDevice(one, alignment.elements))
    assert not agreement.agrees((0, list_ops(ranks, "clone")[0].results[0]))


def test_of_two_writes_that_one_device_makes_later_the_last_one_is_named() -> None:
    def count(x: Tensor, seen: Tensor) -> None:
        seen.add_(x.abs().sum(0))

    def balance(seen: Tensor, bias: Tensor) -> None:
        bias.add_(seen.mean() - seen)

    def run(x: Tensor, seen: Tensor, bias: Tensor, *, early: bool) -> Tensor:
        total = torch.zeros(4, dtype=torch.float64)
        for rows in (x[:3], x[3:]) if early else (x,):
            total = total + (rows + bias).sin().sum(0)
            count(rows, seen)
            if early:
                balance(seen, bias)
        return total

    inputs = {"x": make(6, 4), "seen": torch.zeros(4, dtype=torch.float64), "bias": make(4, seed=5)}
    ranks, one = (
        record_call(
            lambda x, seen, bias, on=on: run(x, seen, bias, early=on),
            None,
            **{name: each.clone() for name, each in inputs.items()},
        )
        for on in (True, False)
    )
    (cause,) = (explainer := Explainer([ranks], one, 0, [])).explain(30.0)
    culprit = Culprits(explainer).make(cause)
    assert (culprit.mechanism, culprit.code) == ("removed", Cause.STATE)
    assert expression_of(culprit) == "bias.add_(seen.mean() - seen)"


def test_zeros_are_traced_through_moves_to_the_operator_that_made_them() -> None:
    def keep(x: Tensor, rank: int) -> Tensor:
        if rank < 0:
            return x.clone()
        whole = x.new_zeros(x.shape)
        whole[:2] = x[:2]
        return whole

    def run(rank: int, x: Tensor) -> Tensor:
        rows = keep(x.sin(), rank).flip(0).reshape(2, -1).clone()
        return (rows @ make(rows.shape[1], 3, seed=8)).tanh()

    culprit = find_culprit(run, make(4, 3))
    assert culprit.made is not None
    assert culprit.made.line is not None
    assert culprit.made.line.expression == "x.new_zeros(x.shape)"


def test_the_most_common_index_of_a_row_leaves_out_padding() -> None:
    places = torch.tensor([[0, 1, 2, 3, 4], [-1, -1, 7, 13, 14]])
    rows, columns = list_cuts(places, (5, 5))
    assert rows.index.tolist() == [0, 2]
    assert columns.index.tolist() == [0, 1, 2, 3, 4]


def test_a_wrong_number_among_positions_is_named_and_not_the_operand_that_it_makes() -> None:
    def turn(x: Tensor, size: int) -> Tensor:
        rates = 10.0 ** (-torch.arange(0, 4, dtype=x.dtype) / size)
        return x * rates.cos()

    def run(rank: int, x: Tensor) -> Tensor:
        size = 4 if rank < 0 else 8
        return (turn(x, size) @ turn(x.sin(), size).mT).tanh()

    culprit = find_culprit(run, make(6, 4))
    assert (culprit.mechanism, culprit.proved, culprit.numbers) == ("number", True, (("8", "4"),))
    assert expression_of(culprit) == "-torch.arange(0, 4, dtype=x.dtype) / size"
