"""Explanations with their sentences: values of parameters that stand in the place of other ones."""

from __future__ import annotations

from explanations import DP_0, GRADIENT, explain

from moeverify.results.cause import Cause
from moeverify.results.slots import Displaced, Flattening, Piece

SLOTS = [
    (
        explain(Cause.PERMUTATION, GRADIENT, Displaced(source="b", exchanged=True, tokens=DP_0.tokens)),
        "the part of dp 0 in the gradient is exchanged with that of b",
        "b, dp 0",
    ),
    (
        explain(Cause.PERMUTATION, GRADIENT, Displaced(source="b", tokens=DP_0.tokens, added=True)),
        "the part of dp 0 in the gradient is that of b, besides its own",
        "b, dp 0",
    ),
    (
        explain(Cause.PERMUTATION, GRADIENT, Displaced(offset=-12, ranks=(1,)), tensors=("a", "b")),
        "2 gradients stand 12 elements too late in a flat buffer of all parameters, so that values of others are in "
        "their place, on rank 1 alone",
        "rank 1",
    ),
    (
        explain(
            Cause.PERMUTATION,
            GRADIENT,
            Displaced(
                flattening=Flattening(written="by-name", read="registered", family="expert", is_outside=True)
            ),
        ),
        "the gradient has the values of others: a flat buffer of all but expert parameters is written in the "
        "order of their names, and cut in the order of the model",
        "",
    ),
    (
        explain(
            Cause.PERMUTATION,
            GRADIENT,
            Displaced(flattening=Flattening(written="reversed", read="reversed", filled_read=8)),
        ),
        "the gradient has the values of others: a flat buffer in the reverse order of the model is cut with each "
        "filled up to a multiple of 8 elements, and written without",
        "",
    ),
    (
        explain(
            Cause.PERMUTATION,
            GRADIENT,
            Displaced(pieces=(Piece(at=0, count=3), Piece(at=3, count=1, tensor="b", start=5)), num_pieces=3),
        ),
        "the gradient has the values of others, one behind the other: 3 zeros, then element 5 of b, and 1 more",
        "",
    ),
    (
        explain(
            Cause.PERMUTATION,
            GRADIENT,
            Displaced(pieces=(Piece(at=0, count=3, tensor="b", start=5),), num_pieces=1),
        ),
        "the gradient has the values of others: elements 5-7 of b",
        "",
    ),
]
