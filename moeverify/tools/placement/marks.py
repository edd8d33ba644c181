"""Conversion between placements and arrays of marks (rank holds expert), bool (L, E, R).

Notation: L MoE layers, E experts, R ranks. It is separate from `placement`, which case files need without
numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moeverify.tools.placement.placement import Placement

BoolArray = npt.NDArray[np.bool_]


def mark(placement: Placement) -> BoolArray:
    """Return the marks of a placement: bool (L, E, R), whether a rank holds an expert."""
    shape = (len(placement.matrices), placement.num_experts, placement.num_ranks)
    marks = np.zeros(shape, dtype=np.bool_)
    for position, matrix in enumerate(placement.matrices):
        for rank, row in enumerate(matrix):
            marks[position, list(row), rank] = True
    return marks


def from_marks(marks: BoolArray, layers: Sequence[int], *, previous: Placement | None = None) -> Placement:
    """Return the placement of marks (L, E, R).

    An expert that stays on its rank keeps its slot of `previous` as far as the row is long enough. Arriving
    experts take the slots of leaving ones.
    """
    matrices = []
    for position, layer_marks in enumerate(marks):
        rows = [np.flatnonzero(layer_marks[:, rank]).tolist() for rank in range(layer_marks.shape[1])]
        if previous is not None:
            rows = [_keep_slots(old, row) for old, row in zip(previous.matrices[position], rows, strict=True)]
        matrices.append(tuple(tuple(row) for row in rows))
    return Placement(marks.shape[1], tuple(matrices), tuple(layers))


def _keep_slots(old: Sequence[int], new: list[int]) -> list[int]:
    """Return the experts of `new`, with the experts of `old` in their old slots."""
    arriving = iter([expert for expert in new if expert not in old])
    row = [expert if expert in new else next(arriving, None) for expert in old]
    return [expert for expert in row if expert is not None] + list(arriving)
