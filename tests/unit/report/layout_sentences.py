"""Explanations with their sentences: values in the order of another layout, of other tokens, or lost."""

from __future__ import annotations

from typing import Any

from explanations import explain

from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.layout import (
    Dim,
    Order,
    Reordered,
)

EXPERTS, ROWS, COLUMNS = Dim(name="experts", size=16), Dim(name="rows", size=32), Dim(name="columns", size=16)
WEIGHT = (EXPERTS, ROWS, COLUMNS)
HEADS, WIDTH = Dim(name="heads", size=8, of="rows"), Dim(name="width", size=4)
PARTS, INNER = Dim(name="parts", size=4, of="rows"), Dim(name="rows", size=8)
HALVES = Dim(name="parts", size=2, of="rows")


def reorder(
    way: Any, *dims: Dim, right: tuple[Dim, ...] = WEIGHT, number: int = 0, **fields: Any
) -> Reordered:
    order = Order(way=way, dims=dims, right=right, number=number)
    return Reordered(scope="rank", orders=(order,), **fields)


def say(operation: Any, sentence: str) -> tuple[Any, str, str]:
    return explain(Cause.PERMUTATION, Quantity.INITIAL_VALUE, operation), f"the initial values {sentence}", ""


LAYOUTS = [
    say(
        reorder("stored", ROWS, EXPERTS, COLUMNS),
        "are stored as [rows 32, experts 16] and read as [experts 16, rows 32]",
    ),
    say(
        reorder("read", ROWS, EXPERTS, COLUMNS, ranks=(1,)),
        "are stored as [experts 16, rows 32] and read as [rows 32, experts 16], on rank 1 alone",
    ),
    say(
        reorder("stored", WIDTH, HEADS, COLUMNS, right=(HEADS, WIDTH, COLUMNS)),
        "have 8 heads interleaved element by element instead of one after the other",
    ),
    say(
        reorder("read", INNER, PARTS, COLUMNS, right=(PARTS, INNER, COLUMNS)),
        "have rows dealt in turn to 4 parts of the rows; each should have consecutive ones",
    ),
    say(reorder("reversed", ROWS), "have the 32 rows in reverse order"),
    say(reorder("rolled", ROWS, number=31), "have the 32 rows 1 place too early, around the end"),
    say(
        reorder("rolled", HALVES, right=(HALVES, ROWS, COLUMNS), number=1),
        "have the 2 parts of the rows in the order 1, 0",
    ),
    say(
        reorder("same", HALVES, right=(HALVES, ROWS, COLUMNS), number=1),
        "have the values of number 1 in all 2 parts of the rows",
    ),
    say(
        reorder("same", Dim(name="rows", size=2), right=(PARTS, Dim(name="rows", size=2)), number=0),
        "have within each of 4 parts of the rows the values of number 0 in all 2 rows",
    ),
    (
        explain(
            Cause.PERMUTATION,
            Quantity.GRADIENT,
            Reordered(
                scope="whole",
                orders=(
                    Order(way="stored", dims=(COLUMNS, ROWS), right=(ROWS, COLUMNS)),
                    Order(way="reversed", dims=(ROWS,), right=(ROWS, COLUMNS)),
                ),
            ),
        ),
        "the gradient is stored as [columns 16, rows 32] and read as [rows 32, columns 16], or has the 32 "
        "rows in reverse "
        "order: the values are the same here",
        "",
    ),
]
