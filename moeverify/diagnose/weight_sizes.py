"""The sizes of a weight's dims that its initial values may be scaled by: rows, columns, both, and halves of these."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.axes.groups import BOTH_FANS, HALVES, WEIGHT_COLUMNS, WEIGHT_ROWS

_MATRIX = 2


def list_sizes(shape: Sequence[int]) -> dict[str, float]:
    """Return the fans of a weight by their names, and half of both; nothing of vectors.

    Of experts that are stacked, the last two dims are those of one.
    """
    if len(shape) < _MATRIX:
        return {}
    rows, columns = shape[-2:]
    sizes: dict[str, float] = {WEIGHT_COLUMNS: columns, WEIGHT_ROWS: rows, BOTH_FANS: rows + columns}
    return sizes | {HALVES[BOTH_FANS]: (rows + columns) / 2.0}
