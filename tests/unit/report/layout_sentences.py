"""Explanations with their sentences: values in the order of another layout, of other tokens, or lost."""

from __future__ import annotations

from typing import Any

from explanations import BACK, OUTPUT, explain

from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.layout import (
    Dim,
    Order,
    Reordered,
)

BATCH, SEQUENCE, FEATURES = (
    Dim(name="batch", size=16),
    Dim(name="sequence", size=8),
    Dim(name="features", size=64),
)
TOKENS = (BATCH, SEQUENCE, FEATURES)
CHUNKS = Dim(name="chunks", size=4, of="sequence")
INNER = SEQUENCE.model_copy(update={"size": 2})
HEADS, WIDTH = Dim(name="heads", size=8, of="features"), Dim(name="width", size=8)
RANKS = Dim(name="ranks", size=2, axis="cp")
ROWS, COLUMNS = Dim(name="rows", size=32), Dim(name="columns", size=16)
BATCH_PARTS = Dim(name="parts", size=4, of="batch")
HALVES = Dim(name="parts", size=2, of="rows")


def reorder(
    way: Any, *dims: Dim, right: tuple[Dim, ...] = TOKENS, number: int = 0, **fields: Any
) -> Reordered:
    order = Order(way=way, dims=dims, right=right, number=number)
    return Reordered(scope="rank", orders=(order,), **fields)


def say(operation: Any, sentence: str, quantity: Quantity = OUTPUT) -> tuple[Any, str, str]:
    return explain(Cause.PERMUTATION, quantity, operation, module="attention"), sentence, "attention"


SEQUENCE_FIRST = reorder("stored", SEQUENCE, BATCH, FEATURES)
LAYOUTS = [
    say(
        SEQUENCE_FIRST,
        "the output of attention is stored as [sequence 8, batch 16] and read as [batch 16, sequence 8]",
    ),
    say(
        reorder("read", SEQUENCE, BATCH, FEATURES, ranks=(1,)),
        "the gradient that attention passes back is stored as [batch 16, sequence 8] and read as [sequence "
        "8, batch 16], "
        "on rank 1 alone",
        BACK,
    ),
    say(
        reorder("stored", BATCH, WIDTH, HEADS, right=(BATCH, HEADS, WIDTH)),
        "the output of attention has 8 heads interleaved element by element instead of one after the other",
    ),
    say(
        reorder("read", INNER, CHUNKS, FEATURES, right=(CHUNKS, INNER, FEATURES)),
        "the output of attention has positions dealt in turn to 4 chunks of the sequence; each should have "
        "consecutive ones",
    ),
    say(
        reorder("read", BATCH, RANKS, SEQUENCE, right=(RANKS, BATCH, SEQUENCE)),
        "the output of attention is stored as [ranks of cp 2, batch 16] and read as [batch 16, ranks of cp 2]",
    ),
    say(
        reorder("rolled", RANKS, right=(RANKS, *TOKENS), number=1),
        "the output of attention has the 2 ranks of cp in the order 1, 0",
    ),
    say(
        reorder("zigzag", CHUNKS, right=(CHUNKS, INNER)),
        "the output of attention has the 4 chunks of the sequence in the order 0, 3, 1, 2",
    ),
    say(
        reorder("out-of-zigzag", CHUNKS, right=(CHUNKS, INNER)),
        "the output of attention has the 4 chunks of the sequence in the order 0, 2, 3, 1",
    ),
    say(reorder("reversed", BATCH), "the output of attention has the 16 batch rows in reverse order"),
    say(
        reorder("rolled", BATCH, number=15),
        "the output of attention has the 16 batch rows 1 place too early, around the end",
    ),
    say(
        reorder("same", RANKS, right=(RANKS, *TOKENS), number=1),
        "the output of attention has the values of rank 1 of cp in all 2 ranks of cp",
    ),
    (
        explain(
            Cause.PERMUTATION,
            Quantity.INITIAL_VALUE,
            reorder("rolled", HALVES, right=(HALVES, ROWS, COLUMNS), number=1),
        ),
        "the initial values have the 2 parts of the rows in the order 1, 0",
        "",
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
    say(
        reorder("same", Dim(name="batch", size=2), right=(BATCH_PARTS, Dim(name="batch", size=2)), number=0),
        "the output of attention has within each of 4 parts of the batch the values of number 0 "
        "in all 2 batch rows",
    ),
    say(
        reorder("rolled", SEQUENCE, number=1, micro_batches=(1,)),
        "the output of attention has the 8 positions 1 place too late, around the end, in micro-batch 1 alone",
    ),
]
