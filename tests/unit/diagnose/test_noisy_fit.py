"""Factors and sums of tensors that were computed in 16 bits: what rounding leaves, and what it does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from wrong_tensors import AXES, WEIGHT, draw, examine, find_hypothesis, make_inputs, make_tensor

from moeverify.diagnose.axes import Axes
from moeverify.diagnose.noisy_fit import fit_noisy, join_factors
from moeverify.results.cause import Cause
from moeverify.results.factor import Product, Source

UNIT = 2.0**-8
RANKS = Axes({"ranks": [[0, 1]]}, [Source(name="ranks", size=2), Source(name="micro-batches", size=4)])


def narrow(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).to(torch.float64)


def sum_narrow(expected: Tensor, num_terms: int, seed: int) -> Tensor:
    """Return a sum that is the expected one, of terms that were each rounded to bfloat16."""
    parts = [draw(*expected.shape, seed=seed + number) for number in range(num_terms - 1)]
    last = expected - torch.stack(parts).sum(dim=0)
    return torch.stack([narrow(part) for part in (*parts, last)]).sum(dim=0)


def make_narrow(expected: Tensor, *locals_: Tensor, name: str = WEIGHT):
    return make_tensor(expected, *locals_, name=name, precision=torch.bfloat16)


def examine_narrow(hypothesis: str, *locals_: Tensor, expected: Tensor):
    tensor = make_narrow(expected, *locals_)
    return examine(hypothesis, tensor, make_inputs(tensor, axes=RANKS))


# The noise of both sides is that of sums of four rounded terms.
EXPECTED = draw(24, 32)
GOLDEN, OTHER = sum_narrow(EXPECTED, 4, 10), sum_narrow(EXPECTED, 4, 20)


def test_sums_of_rounded_terms_have_the_factor_one() -> None:
    factor = fit_noisy(OTHER, GOLDEN, UNIT)
    assert factor.is_noise(UNIT)
    assert factor.agrees(1.0)
    assert factor.residual > 1e-3


@pytest.mark.parametrize(("value", "source"), [(2.0, "ranks"), (0.25, "micro-batches")])
def test_a_factor_is_named_in_spite_of_rounding(value: float, source: str) -> None:
    outcome = examine_narrow("noisy_factor", value * OTHER, value * OTHER, expected=GOLDEN)
    (whole,) = outcome.explanation.operation.contributions
    assert outcome.explanation.cause is Cause.SCALE
    assert whole.factor.value == value
    assert outcome.explanation.is_estimate
    assert whole.factor.sources == (source,)


@pytest.mark.parametrize("value", [1.0, 1.05, 1.9, 1.97, 2.03, 3.0])
def test_a_number_that_no_integer_of_the_run_is_stays_without_a_cause(value: float) -> None:
    assert examine_narrow("noisy_factor", value * OTHER, expected=GOLDEN).explanation is None


def change_rows(values: Tensor, count: int, factor: float) -> Tensor:
    changed = values.clone()
    changed[:count] *= factor
    return changed


@pytest.mark.parametrize(
    "wrong",
    [
        change_rows(2 * OTHER, 12, 1.1),  # half of the rows
        change_rows(2 * OTHER, 1, 2.0),  # one row
        2 * OTHER + 0.1 * draw(24, 1, seed=3) * draw(1, 32, seed=4),  # one term of rank 1
        2 * OTHER + 0.2 * draw(24, 32, seed=5),  # more than rounding leaves
    ],
)
def test_a_residual_with_something_in_it_is_refused(wrong: Tensor) -> None:
    assert examine_narrow("noisy_factor", wrong, expected=GOLDEN).explanation is None


def test_tensors_with_factors_of_their_own_have_none_together() -> None:
    names = ("layers.0.up.weight", "layers.1.up.weight")
    pair = [
        make_narrow(GOLDEN, factor * OTHER, name=name) for name, factor in zip(names, (2.0, 4.0), strict=True)
    ]
    outcome = find_hypothesis("noisy_factor").test(pair, make_inputs(*pair, axes=RANKS))
    assert outcome.explanation is None
    assert join_factors([fit_noisy(each.whole, GOLDEN, UNIT) for each in pair]) is None


def test_small_tensors_must_agree_with_the_others() -> None:
    small = draw(4, seed=7)
    large = make_narrow(GOLDEN, 2 * OTHER)
    for factor, is_named in ((2.0, True), (1.0, False)):
        pair = [large, make_narrow(small, factor * small, name="layers.0.bias")]
        outcome = find_hypothesis("noisy_factor").test(pair, make_inputs(*pair, axes=RANKS))
        assert (outcome.explanation is not None) is is_named


def test_two_integers_of_one_size_are_both_named() -> None:
    tensor = make_narrow(GOLDEN, 2 * OTHER)
    outcome = examine("noisy_factor", tensor, make_inputs(tensor, axes=AXES))
    assert outcome.explanation.candidates == (
        Product(times=("dp_replicate",)),
        Product(times=("ep",)),
    )


def test_it_is_not_asked_of_tensors_with_more_digits() -> None:
    for name in ("noisy_factor", "noisy_sum"):
        tensor = make_tensor(GOLDEN, 2 * OTHER, precision=torch.float32)
        assert not find_hypothesis(name).applies(tensor, make_inputs(tensor))


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_rounded_partial_sums_of_replicas(factor: float) -> None:
    own = draw(24, 32, seed=8)
    outcome = examine_narrow("noisy_sum", factor * own, factor * (OTHER - own), expected=GOLDEN)
    assert outcome.explanation.cause is Cause.MISSING_REDUCTION
    assert outcome.explanation.is_estimate
    assert outcome.explanation.operation.factor.value == factor
    assert outcome.explanation.operation.axes == (Product(times=("ranks",)),)


def test_replicas_that_differ_by_rounding_alone_are_no_partial_sums() -> None:
    # Their sum is twice the golden, as that of a mean would be.
    assert (
        examine_narrow("noisy_sum", OTHER, sum_narrow(EXPECTED, 4, 30), expected=GOLDEN).explanation is None
    )


def test_replicas_whose_sum_lacks_something_are_refused() -> None:
    own = draw(24, 32, seed=8)
    rest = change_rows(OTHER - own, 2, 0.5)
    assert examine_narrow("noisy_sum", own, rest, expected=GOLDEN).explanation is None
