"""Explanations with their sentences: sums made in another way, parts of another shape, and variants of a formula."""

from __future__ import annotations

from explanations import (
    GRADIENT,
    TP,
    explain,
)

from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.operation import (
    Misplaced,
    Misreduced,
)

OPERATIONS = [
    (
        explain(
            Cause.LAYOUT,
            Quantity.INITIAL_VALUE,
            Misplaced(expected=(4, 5), actual=(8, 5), dim=0, axes=(TP,)),
            tensors=("bias",),
        ),
        "bias is placed as parts along dim 0 over tp, and every rank holds as much as the whole: the shape (8, 5) "
        "under this layout, (4, 5) on one device",
        "axis tp",
    ),
    (
        explain(
            Cause.LAYOUT,
            Quantity.INITIAL_VALUE,
            Misplaced(expected=(4, 5), actual=(4, 7)),
            tensors=("one.bias", "other.bias"),
        ),
        "2 parameters have the shape (4, 7) under this layout, (4, 5) on one device (one.bias)",
        "",
    ),
    (
        explain(
            Cause.MISSING_REDUCTION,
            GRADIENT,
            Misreduced(
                op="all_reduce", site="/x/site-packages/pack/file.py:7 in add", ranks=(0, 1), axes=(TP,)
            ),
        ),
        "the gradient is summed over ranks 0, 1 in the place of tp: what ranks bring to the all_reduce at "
        "pack/file.py:7 in add sums to the expected value over tp",
        "axis tp",
    ),
    (
        explain(
            Cause.MISSING_REDUCTION,
            GRADIENT,
            Misreduced(op="all_reduce", met=(TP,), combination="max", axes=(TP,)),
        ),
        "the gradient is the largest over tp and not the sum: what ranks bring to the all_reduce sums to the "
        "expected value over tp",
        "axis tp",
    ),
    (
        explain(
            Cause.MISSING_REDUCTION,
            GRADIENT,
            Misreduced(op="broadcast", met=(TP,), combination="copy", axes=(TP,)),
        ),
        "the gradient is a copy of what one rank has over tp and not the sum: what ranks bring to the broadcast sums "
        "to the expected value over tp",
        "axis tp",
    ),
    (
        explain(Cause.SCALE, GRADIENT, Misreduced(op="all_reduce", met=(TP,))),
        "the gradient is reduced once more over tp: the all_reduce adds up what is right on each rank already",
        "axis tp",
    ),
]
