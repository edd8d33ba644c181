"""Hypotheses about gradients, except fits: cases that each explains, and cases that it must refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from wrong_tensors import (
    AXES,
    WEIGHT,
    draw,
    examine,
    find_hypothesis,
    make_inputs,
    make_sharded,
    make_tensor,
)

from moeverify.explain.fitting.axes import Axes
from moeverify.explain.fitting.first_divergence import Search
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.slices import match_slices
from moeverify.explain.fitting.wrong_tensor import RankShard, WrongTensor
from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause
from moeverify.results.factor import Product
from moeverify.results.operation import Moved, Replaced, Rounded, Unreduced, Zeroed


def on_axes(**groups: list[list[int]]) -> Axes:
    return Axes(groups)


# detached


def test_zeros_on_all_ranks_are_detached() -> None:
    expected = draw(4, 3)
    outcome = examine("detached", make_tensor(expected, 0 * expected, 0 * expected))
    assert outcome.explanation.cause is Cause.DETACHED
    assert outcome.explanation.operation == Zeroed(absent=False)


def test_a_gradient_that_no_rank_has_is_absent() -> None:
    absent = examine("detached", make_tensor(draw(4), None, None)).explanation
    assert absent.operation == Zeroed(absent=True)
    # Where modules are not compared, a wider run may show what the forward pass leaves out.
    assert absent.is_estimate
    search = Search({}, {}, {})
    compared = examine(
        "detached", make_tensor(draw(4), None, None), DiagnosisInputs(search=search)
    ).explanation
    assert not compared.is_estimate


def test_zeros_of_one_rank_alone_are_not_detached() -> None:
    # Rank 0 has the whole sum and rank 1 nothing: a reduction is missing.
    expected = draw(4, 3)
    outcome = examine("detached", make_tensor(expected, expected, 0 * expected))
    assert outcome.explanation is None
    assert examine("detached", make_tensor(expected, None, expected)).explanation is None


def test_a_golden_of_zeros_says_nothing_of_zeros() -> None:
    zeros = torch.zeros(4, dtype=torch.float64)
    assert examine("detached", make_tensor(zeros, zeros)).explanation is None


# replica_sum


def test_replicas_that_sum_to_the_golden_name_the_axis() -> None:
    expected, part = draw(4, 3), draw(4, 3, seed=1)
    tensor = make_tensor(expected, part, expected - part)
    outcome = examine("replica_sum", tensor, make_inputs(tensor, axes=on_axes(tp=[[0, 1]])))
    operation = outcome.explanation.operation
    assert outcome.explanation.cause is Cause.MISSING_REDUCTION
    assert (operation.axes, operation.num_replicas) == ((Product(times=("tp",)),), 2)
    assert operation.factor.is_one


@pytest.mark.parametrize(("scale", "factor"), [(2.0, 2.0), (0.5, 0.5)])
def test_replicas_of_a_mean_are_partial_sums_too(scale: float, factor: float) -> None:
    expected, part = draw(4, 3), draw(4, 3, seed=1)
    tensor = make_tensor(expected, scale * part, scale * (expected - part))
    operation = examine("replica_sum", tensor).explanation.operation
    assert operation.factor.value == pytest.approx(factor)


def test_a_sum_that_is_another_multiple_explains_nothing() -> None:
    expected, part = draw(4, 3), draw(4, 3, seed=1)
    outcome = examine("replica_sum", make_tensor(expected, 3 * part, 3 * (expected - part)))
    assert outcome.explanation is None


@pytest.mark.parametrize(("bound", "explains"), [(1e-12, False), (1e-5, True)])
def test_a_float64_model_with_parts_in_float32_rounds_as_much_as_its_bound(
    bound: float, explains: bool
) -> None:
    expected, part = draw(4, 3), draw(4, 3, seed=1)
    tensor = replace(make_tensor(expected, part, expected - part + 1e-7 * draw(4, 3, seed=2)), bound=bound)
    assert (examine("replica_sum", tensor).explanation is not None) == explains
    assert replace(tensor, bound=1.0).exact == 2.0**-13  # what float32 allows, whatever the bound


def test_only_the_axis_that_explains_it_is_named() -> None:
    expected, part = draw(4, 3), draw(4, 3, seed=1)
    tensor = make_tensor(expected, part, part, expected - part, expected - part)
    axes = on_axes(cp=[[0, 1], [2, 3]], tp=[[0, 2], [1, 3]])
    outcome = examine("replica_sum", tensor, make_inputs(tensor, axes=axes))
    assert outcome.explanation.candidates == (Product(times=("tp",)),)
    assert [seen.axis for seen in outcome.observations] == ["tp"]


@pytest.mark.parametrize(("inner", "holders"), [("etp", [[0, 1], [2, 3]]), ("efsdp", [[0, 2], [1, 3]])])
def test_an_axis_of_which_some_ranks_hold_other_parts_is_not_named_for_the_one_inside(
    inner: str, holders: list[list[int]]
) -> None:
    expected, part = draw(4, 3), draw(4, 3, seed=1)
    shards = []
    for number, ranks in enumerate(holders):
        rows = range(2 * number, 2 * number + 2)
        region = Region.box(expected.shape, (rows, range(3)))
        own = part[rows.start : rows.stop]
        values = (own, expected[rows.start : rows.stop] - own)
        shards += [RankShard(rank, region, each) for rank, each in zip(ranks, values, strict=True)]
    tensor = WrongTensor((0, "gradient", WEIGHT), expected, tuple(shards))
    axes = on_axes(**{"dp_shard": [[0, 1, 2, 3]], inner: holders})
    explanation = examine("replica_sum", tensor, make_inputs(tensor, axes=axes)).explanation
    assert explanation.candidates == (Product(times=(inner,)),)
    assert explanation.operation.num_replicas == 2


def test_axes_of_the_same_ranks_are_both_named_unless_one_does_not_affect_the_tensor() -> None:
    expected, part = draw(4, 3), draw(4, 3, seed=1)
    tensor = make_tensor(expected, part, expected - part)
    both = examine("replica_sum", tensor).explanation
    assert [product.sources for product in both.candidates] == [("dp_replicate",), ("ep",)]
    dense = Axes(AXES.groups, AXES.sources, lambda axis, name: axis != "ep")
    one = examine("replica_sum", tensor, make_inputs(tensor, axes=dense)).explanation
    assert [product.sources for product in one.candidates] == [("dp_replicate",)]


def test_equal_replicas_are_no_partial_sums() -> None:
    expected = draw(4, 3)
    outcome = examine("replica_sum", make_tensor(expected, expected / 2, expected / 2))
    assert outcome.explanation is None


def test_a_sum_that_is_something_else_is_refused() -> None:
    expected = draw(4, 3)
    outcome = examine("replica_sum", make_tensor(expected, draw(4, 3, seed=1), draw(4, 3, seed=2)))
    assert outcome.explanation is None


def test_a_sum_with_something_that_is_not_a_number_explains_nothing() -> None:
    expected = draw(4, 3)
    broken = expected.clone()
    broken[0, 0] = float("nan")
    assert examine("replica_sum", make_tensor(expected, broken, expected)).explanation is None


def test_shards_are_summed_region_by_region() -> None:
    expected, part = draw(4, 3), draw(4, 3, seed=1)
    shards = []
    for half in range(2):
        region = Region.box((4, 3), (range(2 * half, 2 * half + 2), range(3)))
        shards.append(RankShard(half, region, region.take(part)))
        shards.append(RankShard(half + 2, region, region.take(expected - part)))
    tensor = WrongTensor((0, "gradient", WEIGHT), expected, tuple(shards))
    axes = on_axes(dp_replicate=[[0, 2], [1, 3]], dp_shard=[[0, 1], [2, 3]])
    outcome = examine("replica_sum", tensor, make_inputs(tensor, axes=axes))
    assert outcome.explanation.candidates == (Product(times=("dp_replicate",)),)


@pytest.mark.parametrize(("factor", "explains"), [(1.0, True), (2.0, False)])
def test_a_region_of_one_holder_must_be_right_beside_replicas_that_sum_to_the_golden(
    factor: float, explains: bool
) -> None:
    expected, part = draw(4, 3), draw(4, 3, seed=1)
    alone, shared = (Region.box((4, 3), (rows, range(3))) for rows in (range(2), range(2, 4)))
    shards = (
        RankShard(0, alone, factor * alone.take(expected)),
        RankShard(0, shared, shared.take(part)),
        RankShard(1, shared, shared.take(expected - part)),
    )
    tensor = WrongTensor((0, "gradient", WEIGHT), expected, shards)
    outcome = examine("replica_sum", tensor, make_inputs(tensor, axes=on_axes(ep=[[0, 1]])))
    assert (outcome.explanation is not None) is explains


def test_multiples_that_differ_between_regions_explain_nothing() -> None:
    expected, part = draw(4, 3), draw(4, 3, seed=1)
    shards = []
    for half, scale in ((0, 1.0), (1, 2.0)):
        region = Region.box((4, 3), (range(2 * half, 2 * half + 2), range(3)))
        shards.append(RankShard(half, region, scale * region.take(part)))
        shards.append(RankShard(half + 2, region, scale * region.take(expected - part)))
    tensor = WrongTensor((0, "gradient", WEIGHT), expected, tuple(shards))
    axes = on_axes(dp_replicate=[[0, 2], [1, 3]])
    outcome = examine("replica_sum", tensor, make_inputs(tensor, axes=axes))
    assert outcome.explanation is None


def test_a_reported_loss_that_is_a_partial_sum_is_a_metric() -> None:
    expected = torch.tensor(3.0, dtype=torch.float64)
    tensor = make_tensor(expected, torch.tensor(1.0), torch.tensor(2.0), name="lm", kind="loss")
    explanation = examine("replica_sum", tensor).explanation
    assert explanation.cause is Cause.METRIC
    assert isinstance(explanation.operation, Unreduced)


# permutation


def test_swapped_slices_are_a_permutation() -> None:
    expected = draw(6, 5)
    outcome = examine("permutation", make_tensor(expected, expected[[0, 2, 1, 3, 4, 5]]))
    assert outcome.explanation.cause is Cause.PERMUTATION
    assert outcome.explanation.operation == Moved(unit="slice", dim=0, moves=((1, 2), (2, 1)), num_moves=2)


def test_copies_are_duplicates_along_any_dim() -> None:
    expected = draw(4, 6)
    actual = torch.cat([expected[:, :3], expected[:, :3]], dim=1)
    outcome = examine("permutation", make_tensor(expected, actual))
    assert outcome.explanation.cause is Cause.DUPLICATE
    assert outcome.explanation.operation == Moved(
        unit="slice", dim=1, moves=((3, 0), (4, 1), (5, 2)), num_moves=3, copies=True
    )


def test_another_order_of_all_elements_is_a_permutation() -> None:
    expected = draw(8, 4)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    outcome = examine("permutation", make_tensor(expected, expected.flatten()[order].view(8, 4)))
    assert outcome.explanation.operation == Moved(unit="element")


def test_few_elements_in_another_order_may_be_chance() -> None:
    expected = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert examine("permutation", make_tensor(expected, expected[[1, 0, 2]])).explanation is None


def test_a_tensor_some_of_whose_slices_are_right_is_no_permutation() -> None:
    expected = draw(8, 8)
    mixed = torch.cat([expected[:3], draw(5, 8, seed=3)])
    assert examine("permutation", make_tensor(expected, mixed)).explanation is None


def test_a_tensor_whose_slices_are_all_equal_has_not_moved() -> None:
    expected = torch.ones(4, 3, dtype=torch.float64)
    assert match_slices(expected, expected.clone(), 0) == [0, 1, 2, 3]
    assert examine("permutation", make_tensor(expected, expected.clone())).explanation is None


def test_slices_that_are_lost_are_no_copies_of_others_that_are_zero() -> None:
    expected = draw(6, 5)
    expected[4] = 0.0
    lost = expected.clone()
    lost[[1, 3]] = 0.0
    assert match_slices(expected, lost, 0) is None
    assert examine("permutation", make_tensor(expected, lost)).explanation is None


def test_slices_of_zeros_may_move_with_others() -> None:
    expected = draw(6, 5)
    expected[4] = 0.0
    assert match_slices(expected, expected[[0, 4, 2, 3, 1, 5]], 0) == [0, 4, 2, 3, 1, 5]


def test_slices_that_are_scaled_are_no_permutation() -> None:
    expected = draw(6, 5)
    assert examine("permutation", make_tensor(expected, 2 * expected[[1, 0, 2, 3, 4, 5]])).explanation is None


# previous_value


def test_the_gradient_of_the_step_before_is_stale() -> None:
    expected, before = draw(4, 4), draw(4, 4, seed=1)
    tensor = make_tensor(expected, before, before, step=1)
    inputs = make_inputs(tensor, earlier=lambda key: before)
    explanation = examine("previous_value", tensor, inputs).explanation
    assert (explanation.cause, explanation.operation) == (Cause.STALE, Replaced(by="step-before"))


@pytest.mark.parametrize(
    ("value", "actual"),
    [
        (None, draw(4, 4, seed=1)),
        (draw(4, 4), draw(4, 4)),  # it equals the expected value
        (2 * draw(4, 4, seed=1), draw(4, 4, seed=1)),
    ],
)
def test_another_value_of_the_step_before_explains_nothing(value, actual) -> None:
    tensor = make_tensor(draw(4, 4), actual)
    inputs = make_inputs(tensor, earlier=lambda key: value)
    assert examine("previous_value", tensor, inputs).explanation is None


# router_terms


# loss_value


# scaled_loss


# rounding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_of_a_narrower_dtype_are_rounding(dtype: torch.dtype) -> None:
    expected = draw(64, 8)
    explanation = examine("rounding", make_tensor(expected, expected.to(dtype).double())).explanation
    name = str(dtype).removeprefix("torch.")
    assert explanation.cause is Cause.ROUNDING
    assert explanation.operation == Rounded(dtype=name)


def test_the_recipes_own_precision_is_no_finding() -> None:
    expected = draw(64, 8)
    tensor = make_tensor(expected, expected.float().double(), precision=torch.float32)
    assert examine("rounding", tensor).explanation is None


def test_nearly_all_gradients_that_are_left_must_look_like_rounding() -> None:
    expected = draw(64, 8)
    rounded = [make_tensor(expected, expected.bfloat16().double(), name=f"layers.{n}.w") for n in range(3)]
    off = make_tensor(expected, expected + 3.0, name="layers.3.w")
    hypothesis = find_hypothesis("rounding")
    assert hypothesis.test(rounded, make_inputs(*rounded)) is not None
    assert hypothesis.test([*rounded, off], make_inputs(*rounded, off)) is None


# a rank's own part


def test_of_replicas_that_differ_the_worst_is_examined() -> None:
    expected = draw(4, 3)
    tensor = make_tensor(expected, expected, 2 * expected)
    assert tensor.worst_shard.rank == 1
    assert torch.equal(tensor.whole, 2 * expected)
    operation = examine("one_factor", tensor).explanation.operation
    assert operation.contributions[0].factor.value == pytest.approx(2.0)


def test_shards_are_put_together() -> None:
    expected = draw(4, 3)
    tensor = make_sharded(expected, 2 * expected[:2], 2 * expected[2:])
    assert torch.equal(tensor.whole, 2 * expected)
    assert tensor.differs()
    assert not make_sharded(expected, expected[:2].clone(), expected[2:].clone()).differs()
