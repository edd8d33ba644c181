"""Integers that decide which elements later operations take are named on the line that makes them first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from generated import explain_call, expression_of
from recordings import make, record_call
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.counterparts import OneDevice
from moeverify.explain.describe import describe_op
from moeverify.explain.integers import list_integers
from moeverify.explain.joint import Joint

TOKENS = torch.tensor([[0, 7, 5, 1, 6, 9, 4, 0], [3, 8, 1, 1, 9, 4, 2, 7]])


def locate(tokens: Tensor, parts: int) -> Tensor:
    """Return the documents of tokens, where those of several parts are put together in a wrong order."""
    whole = torch.stack(tokens.chunk(parts, 1), -1).flatten(1)
    begins = whole < 3
    return begins.cumsum(1)


def add_documents(x: Tensor, tokens: Tensor, *, parts: int) -> Tensor:
    own, others = locate(tokens, parts).chunk(2, 1)
    for _ in range(12):  # more wrong layers than a chain of edits reaches
        x = (x + own.cos()).masked_fill(own == others, 0.5).sin()
    return x


def route(x: Tensor, tokens: Tensor, *, parts: int) -> Tensor:
    """Add documents, and take as many rows as a decision says, so that later operators have other sizes."""
    x = add_documents(x, tokens, parts=parts)
    chosen = x.argmax(1)
    return (x[:, : int(chosen[0]) + 1].sum() * x.cos()).sum(0)


def list_lines(ranks: Callable[..., Tensor], one: Callable[..., Tensor], **inputs: Tensor) -> list[str]:
    """Return the lines whose integers are replaced before the last operator."""
    program = record_call(ranks, **inputs)
    joint = Joint([program])
    alignment = Alignment(joint, record_call(one, **inputs))
    edits = list_integers(
        alignment, OneDevice(alignment.one, alignment.elements), [(0, len(program.ops) - 1)]
    )
    return [describe_op(program, program.ops[edit.ops[0][1]]).line.expression for edit in edits]


def test_the_first_lines_that_make_wrong_integers_are_replaced() -> None:
    inputs = {"x": make(2, 4), "tokens": TOKENS}
    found = list_lines(partial(add_documents, parts=2), partial(add_documents, parts=1), **inputs)
    assert found == ["torch.stack(tokens.chunk(parts, 1), -1).flatten(1)"]


def test_lines_that_pass_wrong_integers_on_are_left_out() -> None:
    def hide(x: Tensor, places: Tensor) -> Tensor:
        return x.masked_fill(places[:, None] < places, 0.0)

    inputs = {"x": make(4, 4)}
    ranks, one = lambda x: hide(x, torch.arange(4, 8)), lambda x: hide(x, torch.arange(1, 5) % 4)
    assert not list_lines(ranks, one, **inputs)


def test_right_numbers_before_the_first_decision_prove_integers() -> None:
    inputs = {"x": make(2, 4), "tokens": TOKENS}
    culprits = explain_call(partial(route, parts=2), partial(route, parts=1), **inputs)
    assert (culprits[0].mechanism, culprits[0].proved) == ("created", True)
    assert expression_of(culprits[0]) == "torch.stack(tokens.chunk(parts, 1), -1).flatten(1)"


def test_integers_of_ranks_that_other_lines_correct_are_no_cause() -> None:
    def shift(x: Tensor, places: Tensor, *, by: int) -> Tensor:
        own = places + by
        return (x + (own - by).cos()).sin() * (1.5 if by else 1.0)

    inputs = {"x": make(2, 8), "places": torch.arange(8)}
    culprits = explain_call(partial(shift, by=4), partial(shift, by=0), **inputs)
    assert all(culprit.mechanism != "created" for culprit in culprits)
