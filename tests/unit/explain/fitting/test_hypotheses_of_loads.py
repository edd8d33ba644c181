"""Hypotheses about state that was loaded wrongly: cases that each explains, and cases that it must refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from wrong_tensors import draw, examine, make_inputs, make_sharded

from moeverify.explain.fitting.inputs import Saved
from moeverify.explain.fitting.loading import diagnose_load
from moeverify.explain.fitting.wrong_tensor import RankShard, WrongTensor
from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause
from moeverify.results.finding import Finding
from moeverify.results.operation import Altered, Moved, Replaced, Rounded, Shifted, Zeroed

NAME = "weight/embed.weight"


def load(expected: Tensor, *locals_: Tensor, before: Tensor | None = None, name: str = NAME) -> WrongTensor:
    region = Region.whole(expected.shape)
    old = torch.zeros_like(expected) if before is None else before
    shards = tuple(RankShard(rank, region, local, old) for rank, local in enumerate(locals_))
    return WrongTensor((1, "loaded", name), expected, shards)


def save(others: dict[str, Tensor], wrong: tuple[str, ...] = ()) -> Saved:
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, value in others.items():
        by_shape.setdefault(tuple(value.shape), []).append(name)
    return Saved(others.get, by_shape, wrong)


def test_what_is_as_it_was_before_was_not_loaded() -> None:
    expected, before = draw(4, 3), draw(4, 3, seed=1)
    outcome = examine("not_loaded", load(expected, expected, before, before=before))
    assert outcome.explanation.cause is Cause.NOT_LOADED
    assert outcome.explanation.operation == Replaced(by="value-before-load", ranks=(1,))
    assert (outcome.observations[0].num_kept, outcome.observations[0].num_elements) == (12, 24)


def test_a_part_that_was_not_loaded_is_enough_if_the_rest_is_right() -> None:
    expected, before = draw(4, 3), draw(4, 3, seed=1)
    actual = torch.cat([expected[:2], before[2:]])
    assert examine("not_loaded", load(expected, actual, before=before)).explanation is not None
    actual[0] += 1.0
    assert examine("not_loaded", load(expected, actual, before=before)).explanation is None


def test_shards_that_were_not_loaded_name_their_rank() -> None:
    expected, before = draw(4, 3), draw(4, 3, seed=1)
    tensor = make_sharded(
        expected, expected[:2].clone(), before[2:], kind="loaded", before=(before[:2], before[2:])
    )
    assert examine("not_loaded", tensor).explanation.operation.ranks == (1,)


def test_a_wrong_offset_is_found_in_both_directions() -> None:
    expected = draw(32)
    late, early = torch.cat([expected[3:], draw(3, seed=1)]), torch.cat([draw(3, seed=1), expected[:-3]])
    for actual, offset in ((late, 3), (early, -3)):
        explanation = examine("shifted_read", load(expected, actual)).explanation
        assert (explanation.cause, explanation.operation) == (
            Cause.PERMUTATION,
            Shifted(offset=offset, rank=0),
        )
    assert examine("shifted_read", load(expected, draw(32, seed=2))).explanation is None
    assert examine("shifted_read", load(expected, 0 * expected)).explanation is None


def test_a_copy_of_another_tensor_and_two_that_were_exchanged() -> None:
    expected, other = draw(4, 3), draw(4, 3, seed=1)
    tensor = load(expected, other)
    saved = {NAME: expected, "weight/head": other, "weight/small": draw(2)}
    explanation = examine("another_tensor", tensor, make_inputs(tensor, saved=save(saved))).explanation
    assert (explanation.cause, explanation.operation) == (
        Cause.DUPLICATE,
        Replaced(by="tensor", tensor="weight/head"),
    )
    inputs = make_inputs(tensor, saved=save(saved, wrong=("weight/head",)))
    explanation = examine("another_tensor", tensor, inputs).explanation
    assert (explanation.cause, explanation.operation.exchanged) == (Cause.PERMUTATION, True)


def test_a_rank_whose_part_is_that_of_another_tensor() -> None:
    expected, other = draw(4, 3), draw(4, 3, seed=1)
    tensor = make_sharded(expected, expected[:2], other[2:], name="optimizer/w.exp_avg", kind="loaded")
    inputs = make_inputs(tensor, saved=save({"optimizer/w.step": other}, wrong=("optimizer/w.step",)))
    explanation = examine("another_tensor", tensor, inputs).explanation
    assert explanation.operation == Replaced(
        by="tensor", tensor="optimizer/w.step", exchanged=True, ranks=(1,)
    )
    # The rows of another rank are no part of its own.
    moved = make_sharded(expected, expected[:2], other[:2], name="optimizer/w.exp_avg", kind="loaded")
    inputs = make_inputs(moved, saved=save({"optimizer/w.step": other}))
    assert examine("another_tensor", moved, inputs).explanation is None


def test_zeros_and_single_numbers_are_nobodys_values() -> None:
    expected = draw(4, 3)
    for actual in (0 * expected, draw(4, 3, seed=2)):
        tensor = load(expected, actual)
        inputs = make_inputs(tensor, saved=save({"weight/zero": 0 * expected}))
        assert examine("another_tensor", tensor, inputs).explanation is None
    number = load(draw(1), draw(1, seed=1))
    inputs = make_inputs(number, saved=save({"weight/other": draw(1, seed=1)}))
    assert examine("another_tensor", number, inputs).explanation is None


def test_a_state_of_the_step_before_the_save() -> None:
    expected, before = draw(4, 3), draw(4, 3, seed=1)
    tensor = load(expected, before)
    inputs = make_inputs(tensor, earlier=lambda key: before)
    explanation = examine("previous_value", tensor, inputs).explanation
    assert (explanation.cause, explanation.operation) == (Cause.STATE, Replaced(by="step-before"))


def test_zeros_are_detached_unless_it_is_a_single_number() -> None:
    expected = draw(4, 3)
    assert examine("detached", load(expected, 0 * expected)).explanation.operation == Zeroed()
    assert examine("detached", load(draw(1), torch.zeros(1))).explanation is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_state_that_was_saved_in_a_narrower_dtype_is_named(dtype: torch.dtype) -> None:
    expected = draw(4, 3)
    narrow = expected.to(dtype).to(expected.dtype)
    explanation = examine("rounding", load(expected, narrow)).explanation
    assert explanation.cause is Cause.ROUNDING
    assert explanation.operation == Rounded(dtype=str(dtype).removeprefix("torch."))


def test_a_load_of_narrow_numbers_that_are_not_the_saved_ones_is_no_rounding() -> None:
    expected = draw(4, 3)
    near = (expected + 2.0**-5 * expected.abs()).to(torch.bfloat16).to(expected.dtype)
    assert examine("rounding", load(expected, near)).explanation is None
    narrow = expected.to(torch.bfloat16)
    assert examine("rounding", load(narrow, narrow + 1)).explanation is None


def test_a_constant_tensor_is_no_multiple_of_another() -> None:
    tensor = load(torch.ones(4, dtype=torch.float64), 3 * torch.ones(4, dtype=torch.float64))
    assert examine("one_factor", tensor).explanation is None
    expected = draw(4, 3)
    assert examine("one_factor", load(expected, 3 * expected)).explanation.cause is Cause.SCALE


# all together


def find(tensor: str, check: str = "loaded", error: float = 1.0) -> Finding:
    return Finding(check=check, tensor=tensor, kind=check, step=1, rank=0, error=error, bound=0.0)


def test_tensors_of_one_cause_follow_the_worst_of_them() -> None:
    before = draw(4, 3, seed=9)
    tensors = [load(draw(4, 3, seed=n), before, before=before, name=f"weight/{n}") for n in range(3)]
    inputs = make_inputs(*tensors)
    findings = [find("weight/0"), find("weight/1", error=2.0), find("weight/2"), find("loss", check="loss")]
    explained = {each.tensor: each for each in diagnose_load(findings, inputs, 1)}
    head = explained["weight/1"]
    assert head.code == Cause.NOT_LOADED
    assert set(head.explanation.subject.tensors) == {"weight/0", "weight/1", "weight/2"}
    assert [explained[name].follows for name in ("weight/0", "weight/2", "loss")] == [
        "weight/1",
        "weight/1",
        "weight/0",
    ]


def test_what_was_lost_comes_first_and_what_follows_last() -> None:
    lost, other = find("weight/lost", check="coverage"), find("weight/other")
    explained = diagnose_load([find("loss", check="loss"), other, lost], make_inputs(), 1)
    assert [each.tensor for each in explained] == ["weight/lost", "weight/other", "loss"]
    assert (explained[0].code, explained[0].explanation.operation) == (
        Cause.NOT_LOADED,
        Zeroed(absent=True),
    )
    assert (explained[1].explanation, explained[1].follows) == (None, "")
    assert explained[2].follows == "weight/other"


def test_what_is_unknown_follows_a_tensor_of_its_kind_that_was_read_in_a_wrong_place() -> None:
    expected = draw(6, 5)
    moved = load(expected, expected[[1, 0, 2, 3, 4, 5]], name="weight/a")
    unknown = [load(draw(3), draw(3, seed=1), name=name) for name in ("weight/b", "optimizer/b")]
    findings = [find("weight/a"), find("weight/b"), find("optimizer/b")]
    explained = {each.tensor: each for each in diagnose_load(findings, make_inputs(moved, *unknown), 1)}
    assert isinstance(explained["weight/a"].explanation.operation, Moved)
    assert isinstance(explained["weight/b"].explanation.operation, Altered)
    assert explained["weight/b"].follows == "weight/a"
    assert explained["optimizer/b"].follows == ""


def test_a_single_number_keeps_both_of_its_values() -> None:
    values = [torch.tensor(value, dtype=torch.float64) for value in (0.1, 0.0, 0.7)]
    number = load(values[0], values[1], before=values[2], name="w: weight_decay")
    (explained,) = diagnose_load([find("w: weight_decay")], make_inputs(number), 1)
    assert explained.code == Cause.STATE
    assert (explained.observations[0].expected, explained.observations[0].actual) == (0.1, 0.0)


def test_a_tensor_that_was_not_examined_stays_as_it_is() -> None:
    finding = find("weight/far")
    assert diagnose_load([finding], make_inputs(), 1) == [finding]
