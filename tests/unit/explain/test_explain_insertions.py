"""Operators that one device applies first: results stay of the size of their operands."""

from __future__ import annotations

import pytest
import torch

from moeverify.explain.insertions import _apply


@pytest.mark.parametrize(
    ("one", "two", "made"),
    [((6, 4), (6,), (6, 4)), ((6, 4), (4,), (6, 4)), ((6, 1), (1, 4), (6, 4)), ((6,), (6,), (6,))],
)
def test_operands_are_broadcast_along_rows(
    one: tuple[int, ...], two: tuple[int, ...], made: tuple[int, ...]
) -> None:
    found = _apply(torch.mul, torch.ones(one), torch.ones(two))
    assert found is not None
    assert found.shape == made


def test_flat_parameters_make_no_matrix_of_their_pairs() -> None:
    assert _apply(torch.mul, torch.ones(30_000), torch.ones(20_000)) is None
