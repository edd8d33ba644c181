"""A divisor of all tokens is said only where it gives the factors of gradients, not of what a loss passes back."""

from __future__ import annotations

from moeverify.diagnose.hypotheses.linear_fit import _agrees
from moeverify.results.token_weights import Averaging, TokenCount, TokenGroups


def test_a_divisor_must_give_the_factors_of_gradients() -> None:
    halved = Averaging(divisor=(46, 92))
    assert _agrees(halved, [2.0, 2.0])
    assert not _agrees(halved, [0.5, 0.5])
    assert not _agrees(halved, [2.0, 1.0])
    means = Averaging(over=TokenCount(of="valid", groups=TokenGroups(unit="row")))
    assert _agrees(means, [1.07, 0.94])
