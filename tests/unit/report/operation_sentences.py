"""Explanations with their sentences: differently computed sums, other shapes, and variants of a formula."""

from __future__ import annotations

from explanations import (
    TP,
    explain,
)

from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.operation import (
    Misplaced,
)

OPERATIONS = [
    (
        explain(
            Cause.LAYOUT,
            Quantity.INITIAL_VALUE,
            Misplaced(expected=(4, 5), actual=(8, 5), dim=0, axes=(TP,)),
            tensors=("bias",),
        ),
        "bias is placed as parts along dim 0 over tp, but every rank holds the size of the whole: the shape (8, 5) "
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
        explain(Cause.LAYOUT, Quantity.INITIAL_VALUE, Misplaced(expected=(4, 6), actual=(4, 3))),
        "w has values that no block of the tensor on one device has: the shape (4, 3) under this "
        "layout, (4, 6) on one device",
        "",
    ),
]
