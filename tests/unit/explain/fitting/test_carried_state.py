"""A step that started from other optimizer state than the previous step left, and similar errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from wrong_tensors import draw, examine, make_inputs, make_sharded, make_tensor

from moeverify.explain.fitting.diagnosis import diagnose
from moeverify.explain.fitting.recomputed import merge_with_origins
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Factor, Product
from moeverify.results.finding import Finding
from moeverify.results.operation import Carried

DECAYS = {"exp_avg": 0.9, "exp_avg_sq": 0.95, "momentum_buffer": 0.5}
SHAPE = (8, 6)
GRADIENT = draw(*SHAPE, seed=1)
OLDER, BEFORE = draw(*SHAPE, seed=2), draw(*SHAPE, seed=3)


def step_from(state: Tensor, moment: str) -> Tensor:
    """Return the result of a step from a state, as torch's optimizers compute it."""
    decay = DECAYS[moment]
    if moment == "exp_avg_sq":
        return decay * state + (1.0 - decay) * GRADIENT * GRADIENT
    return decay * state + (1.0 if moment == "momentum_buffer" else 1.0 - decay) * GRADIENT


def examine_state(
    *began: Tensor,
    moment: str = "exp_avg",
    is_sharded: bool = False,
    parameter: str = "layers.1.moe.experts.up",
) -> Any:
    """Return the hypothesis's result for ranks that began a step with these states, or with shards of one."""
    expected = step_from(BEFORE, moment)
    parts: list[Tensor] = []
    start = 0
    for state in began:
        rows = slice(start, start + len(state)) if is_sharded else slice(None)
        parts.append(_step_rows(state, rows, moment))
        start += len(state)
    make = make_sharded if is_sharded else make_tensor
    tensor = make(expected, *parts, name=f"{parameter}.{moment}", kind="optimizer_state")
    return examine("carried_state", tensor, make_state_inputs(tensor))


def _step_rows(state: Tensor, rows: slice, moment: str) -> Tensor:
    whole = BEFORE.clone()
    whole[rows] = state
    return step_from(whole, moment)[rows]


def make_state_inputs(*tensors: WrongTensor) -> Any:
    return make_inputs(
        *tensors,
        decays=DECAYS,
        earlier=lambda key: BEFORE,
    )


def change_rows(rows: list[int], change: Callable[[Tensor], Tensor]) -> Tensor:
    changed = BEFORE.clone()
    changed[rows] = change(changed[rows])
    return changed


@pytest.mark.parametrize("moment", DECAYS)
def test_slices_that_were_reset_are_named(moment: str) -> None:
    operation = examine_state(change_rows([1, 5], torch.zeros_like), moment=moment).explanation.operation
    assert (operation.factor.value, operation.block.dim, operation.block.indices) == (0.0, 0, (1, 5))
    assert (operation.block.unit, operation.ranks) == ("expert", ())


def test_columns_are_slices_too() -> None:
    began = BEFORE.clone()
    began[:, 2:4] = 0
    operation = examine_state(began, parameter="layers.0.mlp.up.weight").explanation.operation
    assert (operation.block.dim, operation.block.indices) == (1, (2, 3))


@pytest.mark.parametrize("moment", DECAYS)
def test_the_shard_of_a_rank_that_was_reset_names_the_rank(moment: str) -> None:
    outcome = examine_state(BEFORE[:4], torch.zeros(4, 6), moment=moment, is_sharded=True)
    assert outcome.explanation.cause is Cause.CARRIED_STATE
    assert outcome.explanation.operation == Carried(factor=outcome.explanation.operation.factor, ranks=(1,))
    assert outcome.explanation.operation.factor.is_zero


def test_a_replica_that_was_reset_names_its_rank() -> None:
    operation = examine_state(BEFORE, torch.zeros(SHAPE)).explanation.operation
    assert (operation.factor.is_zero, operation.block, operation.ranks) == (True, None, (1,))


def test_state_that_was_summed_over_the_ranks_that_have_it() -> None:
    operation = examine_state(change_rows([2, 3], lambda rows: 2 * rows)).explanation.operation
    assert operation.factor.value == pytest.approx(2.0)
    assert operation.factor.equals == (Product(times=("dp_replicate",)), Product(times=("ep",)))
    assert operation.block.indices == (2, 3)


@pytest.mark.parametrize("moment", DECAYS)
def test_state_of_other_slices_is_found_with_where_it_came_from(moment: str) -> None:
    began = BEFORE.clone()
    began[[0, 6]] = BEFORE[[6, 2]]
    operation = examine_state(began, moment=moment).explanation.operation
    assert operation.moves == ((0, 6), (6, 2))
    assert operation.block.indices == (0, 6)


def test_state_of_other_slices_may_be_zero() -> None:
    """An expert without tokens has no state; after a swap its state is zero except for rounding."""
    before = change_rows([6], torch.zeros_like)
    began = before.clone()
    began[[0, 6]] = before[[6, 0]]
    expected, actual = step_from(before, "exp_avg"), step_from(began, "exp_avg")
    tensor = make_tensor(expected, actual, name="up.exp_avg", kind="optimizer_state")
    inputs = make_inputs(tensor, decays=DECAYS, earlier=lambda key: before)
    assert examine("carried_state", tensor, inputs).explanation.operation.moves == ((0, 6), (6, 0))


def test_state_that_came_to_a_slice_without_gradient_and_from_it() -> None:
    """An expert without tokens has zero state; recomputing the state from another expert's still rounds."""
    without = torch.tensor([6])
    before, gradient = (draw(8, 60, seed=seed).index_fill(0, without, 0.0) for seed in (3, 1))
    began = before[[0, 6, 2, 3, 4, 5, 1, 7]]
    expected, actual = (0.9 * state + 0.1 * gradient for state in (before, began))
    assert not torch.equal(actual[6] / 0.9, before[1])  # computed back, it is rounded
    tensor = make_tensor(expected, actual, name="layers.1.moe.experts.up.exp_avg", kind="optimizer_state")
    inputs = make_inputs(tensor, decays=DECAYS, earlier=lambda key: before)
    operation = examine("carried_state", tensor, inputs).explanation.operation
    assert operation.moves == ((1, 6), (6, 1))


@pytest.mark.parametrize(
    "actual",
    [
        pytest.param(0.8 * BEFORE + 0.2 * GRADIENT, id="another beta"),
        pytest.param(0.9 * BEFORE + 0.3 * GRADIENT, id="a gradient that was not clipped"),
        pytest.param(BEFORE, id="a step that was left out"),
        pytest.param(step_from(change_rows([1], torch.zeros_like), "exp_avg") + 1e-3 * OLDER, id="two bugs"),
        pytest.param(
            step_from(torch.cat([0 * BEFORE[:2], 2 * BEFORE[2:4], BEFORE[4:]]), "exp_avg"), id="two factors"
        ),
    ],
)
def test_what_else_is_wrong_with_a_moment_is_not_this(actual: Tensor) -> None:
    tensor = make_tensor(step_from(BEFORE, "exp_avg"), actual, name="up.exp_avg", kind="optimizer_state")
    assert examine("carried_state", tensor, make_state_inputs(tensor)).explanation is None


def test_in_the_first_step_there_is_nothing_to_begin_with() -> None:
    tensor = make_tensor(GRADIENT, 2 * GRADIENT, name="up.exp_avg", kind="optimizer_state")
    assert examine("carried_state", tensor, make_inputs(tensor, decays=DECAYS)).explanation is None


# its consequences


def find(tensor: WrongTensor, check: str) -> Finding:
    return Finding(
        check=check, kind=tensor.key[1], tensor=tensor.name, step=0, rank=0, ranks=(0,), error=1.0, bound=0.1
    )


def list_lost() -> tuple[WrongTensor, WrongTensor, WrongTensor]:
    """Return a moment that was reset, its update, and a counter that was reset with it."""
    expected, began = step_from(BEFORE, "exp_avg"), 0 * BEFORE
    moment = make_tensor(expected, step_from(began, "exp_avg"), name="up.exp_avg", kind="optimizer_state")
    update = make_tensor(draw(*SHAPE, seed=8), draw(*SHAPE, seed=9), name="up", kind="update")
    one, two = (torch.tensor(value, dtype=torch.float64) for value in (1.0, 2.0))
    return moment, update, make_tensor(two, one, name="up.step", kind="optimizer_state")


def test_the_update_made_of_lost_state_follows_from_it() -> None:
    moment, update, _ = list_lost()
    other = make_tensor(draw(4, 4), draw(4, 4, seed=5), name="down", kind="update")
    wrong = (moment, update, other)
    findings = [find(each, "optimizer state" if each is moment else "update") for each in wrong]
    found = diagnose(findings, make_state_inputs(*wrong))
    assert [(each.tensor, each.code, each.unexplained) for each in found if not each.follows] == [
        ("up.exp_avg", Cause.CARRIED_STATE, ()),
        ("down", "", ("down",)),
    ]


def test_a_counter_that_was_reset_does_not_hide_the_moments() -> None:
    moment, update, counter = list_lost()
    wrong = (moment, update, counter)
    findings = [find(each, "update" if each is update else "optimizer state") for each in wrong]
    found = diagnose(findings, make_state_inputs(*wrong))
    assert [(each.tensor, each.code) for each in found if not each.follows] == [
        ("up.step", Cause.STATE),
        ("up.exp_avg", Cause.CARRIED_STATE),
    ]


@pytest.mark.parametrize(("kind", "is_cause"), [(Kind.OPTIMIZER_STATE, False), (Kind.UPDATE, True)])
def test_a_step_that_does_not_follow_from_the_ranks_own_state_is_the_cause(kind: str, is_cause: bool) -> None:
    moment, *_ = list_lost()
    explanation = Explanation(
        cause=Cause.CARRIED_STATE,
        subject=Subject(quantity=Quantity.OPTIMIZER_STATE, tensors=(moment.name,)),
        operation=Carried(factor=Factor(value=0.0)),
    )
    origin = find(moment, "optimizer state").model_copy(update={"explanation": explanation})
    recomputed = find(moment, CheckName.OPTIMIZER_STEP).model_copy(update={"kind": kind})
    (left,), _ = merge_with_origins([origin], [recomputed])
    assert (left.follows == "") is is_cause
