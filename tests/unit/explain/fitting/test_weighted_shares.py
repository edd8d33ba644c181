"""Weights of the batch's shares as functions of the ranks' numbers of valid tokens."""

from __future__ import annotations

import pytest

from moeverify.explain.fitting.weighted_shares import find_own_tokens


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((81.0, 96.0, 40.0), "times"),
        ((1 / 81, 1 / 96, 1 / 40), "divided"),
        ((243 / 217, 288 / 217, 120 / 217), "share"),
        ((81.0, 96.0, 41.0), None),
        ((162.0, 192.0, 80.0), None),
    ],
)
def test_weights_by_the_ranks_own_tokens(weights: tuple[float, ...], expected: str | None) -> None:
    assert find_own_tokens(weights, (81, 96, 40)) == expected


def test_equal_numbers_of_tokens_are_a_factor_like_any_other() -> None:
    assert find_own_tokens((64.0, 64.0), (64, 64)) is None
    assert find_own_tokens((0.0, 64.0), (0, 64)) is None
