"""Hypotheses about initial values, routing, reported losses, norms, updates and state."""

from __future__ import annotations

import pytest
import torch
from wrong_tensors import AXES, draw, examine, make_inputs, make_sharded, make_tensor

from moeverify.cases.axes.groups import TOKENS, VALID_TOKENS
from moeverify.explain.fitting.axes import Axes
from moeverify.explain.fitting.first_divergence import Search
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Source
from moeverify.results.observation import RankValues, ScalarValues, WrongElements
from moeverify.results.operation import (
    Altered,
    Miscounted,
    OwnValues,
    Replaced,
    Scaled,
    Unmoved,
    Zeroed,
)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


# initial values


def test_a_rank_that_starts_otherwise_is_named() -> None:
    expected = draw(8, 4)
    tensor = make_tensor(expected, expected, draw(8, 4, seed=5), kind="initial_weight", step=-1)
    assert examine("permutation", tensor).explanation is None
    explanation = examine("own_values", tensor).explanation
    assert (explanation.cause, explanation.operation) == (
        Cause.REPLICAS,
        OwnValues(ranks=(1,), axes=("dp_replicate", "ep")),
    )
    alone = make_tensor(expected, draw(8, 4, seed=5), kind="initial_weight", step=-1)
    assert examine("own_values", alone).explanation.operation == OwnValues(ranks=(0,))


def test_weights_that_nobody_filled_in_are_zero() -> None:
    tensor = make_tensor(draw(4), torch.zeros(4), torch.zeros(4), kind="initial_weight")
    assert examine("detached", tensor).explanation.operation == Zeroed()


# routing


def count(*per_rank: list[float]) -> object:
    expected = torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64)
    locals_ = [torch.tensor(values, dtype=torch.float64) for values in per_rank]
    return make_tensor(expected, *locals_, name="layers.1.moe.router", kind="router_counts")


def test_the_count_of_the_worst_rank_is_quoted() -> None:
    tensor = count([10.0, 20.0, 30.0], [10.0, 20.0, 24.0])
    explanation = examine("altered", tensor).explanation
    assert explanation.cause is Cause.STATE
    assert explanation.operation == Miscounted(expected=60.0, actual=54.0, rank=1)


@pytest.mark.parametrize(("actual", "cause"), [(120.0, Cause.PADDING), (90.0, Cause.STATE)])
def test_a_count_of_all_tokens_where_valid_ones_count_has_padding(actual: float, cause: Cause) -> None:
    tensor = make_tensor(
        torch.tensor([60.0]), torch.tensor([actual]), name="layers.1.moe.router", kind="router_counts"
    )
    sizes = (Source(name=TOKENS, size=40), Source(name=VALID_TOKENS, size=20))
    inputs = make_inputs(tensor, axes=Axes({}, loss_counts=sizes))
    explanation = examine("altered", tensor, inputs).explanation
    assert (explanation.cause, explanation.operation.counts_padding) == (cause, cause is Cause.PADDING)


@pytest.mark.parametrize(("is_old", "found"), [(True, Replaced(by="step-before")), (False, None)])
def test_counts_of_the_step_before_were_not_counted_again(is_old: bool, found: Replaced | None) -> None:
    tensor = count([30.0, 20.0, 10.0])
    old = torch.tensor([30.0, 20.0, 10.0], dtype=torch.float64)
    inputs = make_inputs(tensor, earlier=lambda key: old if is_old else None)
    explanation = examine("previous_value", tensor, inputs).explanation
    assert (explanation.operation if explanation is not None else None) == found


# losses


def test_tokens_counted_twice_are_a_metric() -> None:
    tensor = count([20.0, 40.0, 60.0])
    explanation = examine("one_factor", tensor).explanation
    assert explanation.cause is Cause.METRIC
    assert explanation.operation.contributions[0].factor.value == pytest.approx(2.0)
    assert explanation.candidates == ()  # two ranks or a second pass: the number alone does not decide


def test_counts_of_each_ranks_own_tokens_are_not_reduced() -> None:
    tensor = count([4.0, 8.0, 20.0], [6.0, 12.0, 10.0])
    explanation = examine("replica_sum", tensor).explanation
    assert explanation.cause is Cause.STATE
    assert [product.sources for product in explanation.candidates] == [("dp_replicate",), ("ep",)]


@pytest.mark.parametrize(
    ("kind", "cause"), [("router_ids", Cause.ROUTING), ("router_weights", Cause.FORWARD)]
)
def test_a_router_that_differs_over_right_inputs(kind: str, cause: Cause) -> None:
    tensor = make_tensor(draw(2, 3), draw(2, 3, seed=1), name="layers.1.moe.router", kind=kind)
    compared = Search({}, {"forward": 9, "backward": 9}, {"forward": 0.0, "backward": 0.0})
    assert examine("altered", tensor, make_inputs(tensor, search=compared)).explanation.cause is cause
    # Where no module was compared, its inputs may be wrong.
    assert examine("altered", tensor).explanation is None


# reported losses


def test_a_reported_number_always_has_a_factor() -> None:
    tensor = make_tensor(scalar(2.0), scalar(3.0), name="lm", kind="loss")
    explanation = examine("one_factor", tensor).explanation
    assert (explanation.cause, explanation.subject.quantity) == (Cause.METRIC, Quantity.LOSS)
    assert explanation.operation.contributions[0].factor.value == 1.5
    assert explanation.candidates == ()


def test_a_reported_number_that_should_be_zero_has_none() -> None:
    tensor = make_tensor(scalar(0.0), scalar(3.0), name="z", kind="loss")
    assert examine("one_factor", tensor).explanation is None
    outcome = examine("altered", tensor)
    assert (outcome.explanation.cause, outcome.explanation.operation) == (Cause.METRIC, Altered())
    assert outcome.observations == (ScalarValues(expected=0.0, actual=3.0, rank=0),)


# norms


def test_the_square_of_a_norms_factor_is_what_has_sources() -> None:
    tensor = make_tensor(scalar(1.0), scalar(2.0**0.5), scalar(2.0**0.5), name="total", kind="gradient_norm")
    outcome = examine("gradient_norm", tensor)
    (contribution,) = outcome.explanation.operation.contributions
    assert outcome.explanation.cause is Cause.NORM
    assert (contribution.factor.power, contribution.factor.value) == (2, pytest.approx(2.0**0.5))
    assert [product.sources for product in contribution.factor.equals] == [("dp_replicate",), ("ep",)]
    assert outcome.observations == (ScalarValues(expected=1.0, actual=2.0**0.5, rank=0),)


def test_every_axis_has_to_do_with_a_norm_and_a_loss() -> None:
    dense = Axes(AXES.groups, AXES.sources, lambda axis, name: axis != "ep" or "moe" in name)
    norm = make_tensor(scalar(1.0), *2 * [scalar(2.0**0.5)], name="total", kind="gradient_norm")
    loss = make_tensor(scalar(1.0), *2 * [scalar(2.0)], name="lm", kind="loss")
    gradient = make_tensor(draw(8), *2 * [2 * draw(8)], name="embed.weight")
    for name, tensor, num_axes in (
        ("gradient_norm", norm, 2),
        ("one_factor", loss, 2),
        ("one_factor", gradient, 1),
    ):
        explanation = examine(name, tensor, make_inputs(tensor, axes=dense)).explanation
        assert len(explanation.candidates) == num_axes


def test_ranks_that_disagree_on_the_norm_and_the_worst_of_them_are_named() -> None:
    tensor = make_tensor(scalar(1.0), scalar(1.1), scalar(0.5), name="total", kind="gradient_norm")
    outcome = examine("gradient_norm", tensor)
    assert outcome.observations == (
        ScalarValues(expected=1.0, actual=0.5, rank=1),
        RankValues(values=(0.5, 1.1)),
    )
    assert outcome.explanation.operation.contributions[0].factor.value == 0.5


# updates


def test_an_update_of_zero_is_unmoved() -> None:
    expected = draw(16)
    explanation = examine("unmoved", make_tensor(expected, 0 * expected, kind="update")).explanation
    assert (explanation.cause, explanation.operation) == (Cause.STALE, Unmoved())
    assert examine("unmoved", make_tensor(expected, 2 * expected, kind="update")).explanation is None


@pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-3])
def test_in_float32_one_rank_stands_still_where_the_others_match_but_for_rounding(noise: float) -> None:
    expected = draw(8, 4)
    first = expected[:4] * (1.0 + noise * draw(4, 4, seed=1))
    tensor = make_sharded(expected, first, 0 * expected[4:], kind="update", precision=torch.float32)
    explanation = examine("unmoved", tensor).explanation
    if noise < 1e-3:
        assert (explanation.cause, explanation.operation) == (Cause.STALE, Unmoved(ranks=(1,)))
    else:
        assert explanation is None


@pytest.mark.parametrize("unused", [True, False])
def test_a_copy_that_nothing_uses_stands_still(unused: bool) -> None:
    expected, gradient = draw(4), draw(4, seed=1)
    update = make_tensor(expected, expected, 0 * expected, kind="update")
    came = make_tensor(gradient, gradient, None if unused else gradient, kind="gradient")
    outcome = examine("unmoved", update, make_inputs(update, came))
    assert outcome.explanation.operation == Unmoved(ranks=(1,), unused=unused)


def test_an_update_of_another_size_is_scaled() -> None:
    expected = draw(16)
    explanation = examine("one_factor", make_tensor(expected, 2 * expected, kind="update")).explanation
    assert explanation.cause is Cause.SCALE
    assert isinstance(explanation.operation, Scaled)


# state


def test_a_buffer_that_is_that_of_the_step_before_did_not_move() -> None:
    expected, before = draw(8), draw(8, seed=1)
    tensor = make_tensor(expected, before, name="layers.0.moe.router.selection_bias", kind="buffer")
    inputs = make_inputs(tensor, earlier=lambda key: before)
    explanation = examine("previous_value", tensor, inputs).explanation
    assert (explanation.cause, explanation.operation) == (Cause.STALE, Unmoved())


def test_a_buffer_that_moved_otherwise_counts_its_wrong_elements() -> None:
    expected = draw(8)
    actual = expected.clone()
    actual[:3] += 0.5
    outcome = examine("altered", make_tensor(expected, actual, name="bias", kind="buffer"))
    assert outcome.explanation.cause is Cause.STATE
    assert outcome.observations == (WrongElements(num_wrong=3, num_elements=8),)


@pytest.mark.parametrize(("actual", "is_old"), [(0.19, True), (0.2, False), (0.1900001, False)])
def test_a_clip_by_the_norm_of_the_step_before_is_stale(actual: float, is_old: bool) -> None:
    numbers = [torch.tensor(value, dtype=torch.float64) for value in (0.25, actual, 0.19)]
    tensor = make_tensor(*numbers[:2], name="clip_coefficient", kind="gradient_norm", step=1)
    inputs = make_inputs(tensor, earlier=lambda key: numbers[2])
    explanation = examine("gradient_norm", tensor, inputs).explanation
    assert (explanation.cause is Cause.STALE) is is_old
    # If the step before had the same right number, nothing shows that it is old.
    same = make_inputs(tensor, earlier=lambda key: numbers[0])
    assert examine("gradient_norm", tensor, same).explanation.cause is Cause.NORM


@pytest.mark.parametrize(
    ("ratio", "exponent"),
    [
        (2.0**10, 10),
        (2.0**16 * 1.001, 16),
        (2.0**-12, -12),
        (1000.0, 0),
        (8.0, 0),
        (2.0**10 * 1.01, 0),
        (0.0, 0),
    ],
)
def test_a_norm_of_gradients_with_a_scale_of_the_loss(ratio: float, exponent: int) -> None:
    tensor = make_tensor(scalar(1.0), *2 * [scalar(ratio)], name="total", kind="gradient_norm")
    explanation = examine("gradient_norm", tensor).explanation
    assert explanation is not None
    assert explanation.operation.loss_scale == exponent
    assert explanation.names_operation or not exponent
