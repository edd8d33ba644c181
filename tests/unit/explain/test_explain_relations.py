"""Explanations by a relation of wrong values to right ones: multiples, rounding, other rows, and copies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from generated import explain_call, expression_of
from recordings import make, record_call
from torch import Tensor

from moeverify.explain.culprits import Culprits
from moeverify.explain.explain import Explainer
from moeverify.explain.program import SETUP, Program
from moeverify.explain.record import Recorder
from moeverify.explain.relation import find_relation
from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind


@pytest.mark.parametrize(("dtype", "cause"), [(torch.bfloat16, Cause.ROUNDING), (None, Cause.STATE)])
def test_a_write_that_rounds_is_told_from_another(dtype: torch.dtype | None, cause: Cause) -> None:
    def copy(sums: Tensor) -> None:
        sums.copy_(sums.sin() if dtype is None else sums.to(dtype))

    def run(x: Tensor, *, writes: bool) -> Tensor:
        sums = x.exp()
        if writes:
            copy(sums)
        return sums.cumsum(0)

    (culprit,) = explain_call(lambda x: run(x, writes=True), lambda x: run(x, writes=False), x=make(6, 8))
    assert (culprit.mechanism, culprit.proved) == ("removed" if dtype is None else "dtype", True)
    assert culprit.code is cause
    assert culprit.rounds_to == ("" if dtype is None else "bfloat16")


def test_rows_of_the_right_tensor_in_another_place_are_named() -> None:
    def run(x: Tensor, w: Tensor, row: int) -> Tensor:
        return x @ w[row]

    inputs = {"x": make(6, 8), "w": make(3, 8, 5, seed=1)}
    (culprit,) = explain_call(lambda x, w: run(x, w, 2), lambda x, w: run(x, w, 0), **inputs)
    assert culprit.taken is not None
    assert culprit.right is not None
    assert (culprit.taken.rows, culprit.right.rows, culprit.code) == ((2,), (0,), Cause.PERMUTATION)


def test_an_initial_value_that_is_right_elsewhere_is_a_copy() -> None:
    def record(*seeds: int) -> Program:
        recorder = Recorder()
        with recorder.recording():
            for name, seed in zip("ab", seeds, strict=True):
                weight = make(4, 5, seed=seed).clone()
                recorder.observe(SETUP, Kind.INITIAL_WEIGHT, name, weight, Region.whole((4, 5)))
        return recorder.program

    explainer = Explainer([record(0, 0)], record(0, 1), SETUP, [])
    (culprit,) = [Culprits(explainer).make(cause) for cause in explainer.explain(10.0)]
    assert (culprit.mechanism, culprit.code) == ("moved", Cause.DUPLICATE)
    assert culprit.copy_of == "initial_weight/a"


@pytest.mark.parametrize(("wrong", "line"), [(0.5, "q @ k.T * scale"), (0.25, "")])
def test_scores_that_are_scaled_later_are_wrong_where_the_scale_is(wrong: float, line: str) -> None:
    def ranks(q: Tensor, k: Tensor) -> Tensor:
        scale = wrong
        scores = q @ k.T * scale
        return scores.softmax(-1)

    def one(q: Tensor, k: Tensor) -> Tensor:
        return ((q * 0.5) @ (k.T * 0.5)).softmax(-1)

    culprits = explain_call(ranks, one, q=make(6, 8), k=make(6, 8, seed=1))
    assert [expression_of(culprit) for culprit in culprits] == ([line] if line else [])
    assert all(culprit.mechanism == "scale" and culprit.factor == 2.0 for culprit in culprits)


def test_a_multiple_that_is_squared_is_wrong_where_it_is_made() -> None:
    def ranks(x: Tensor) -> Tensor:
        wide = x.tanh() * 3
        return wide.square().cos()

    def one(x: Tensor) -> Tensor:
        return x.tanh().square().cos()

    (culprit,) = explain_call(ranks, one, x=make(6, 8))
    assert culprit.mechanism == "scale"
    assert expression_of(culprit) == "x.tanh() * 3"


def test_steps_up_and_down_prove_nothing() -> None:
    def count(x: Tensor) -> Tensor:
        return (x.sum(0) - 0.5).sign() * 0.1

    def ranks(x: Tensor, y: Tensor) -> Tensor:
        return count(y)

    def one(x: Tensor, y: Tensor) -> Tensor:
        return count(x)

    culprits = explain_call(ranks, one, x=make(3, 40), y=make(3, 40, seed=1))
    assert not any(culprit.proved for culprit in culprits)


@pytest.mark.parametrize("on_one", [False, True])
def test_a_buffer_with_the_memory_of_a_weight_is_told_from_a_copy(on_one: bool) -> None:
    def take(weight: Tensor) -> Tensor:
        return weight.detach()

    def copy(weight: Tensor) -> Tensor:
        return weight.detach().clone()

    def record(shares: bool, rate: float) -> Program:
        recorder, weight, whole = Recorder(), make(6, 4).requires_grad_(), Region.whole((6, 4))
        recorder.name_tensors([("w", weight)])
        with recorder.recording():
            average = take(weight) if shares else copy(weight)
            recorder.observe(SETUP, Kind.INITIAL_WEIGHT, "w", weight, whole)
            recorder.observe(SETUP, Kind.INITIAL_BUFFER, "average", average, whole)
            recorder.begin_step(0)
            with torch.no_grad():
                weight.mul_(1.5)
                average.lerp_(weight.sin(), rate)
            recorder.observe(0, Kind.BUFFER, "average", average, whole)
            recorder.observe(0, Kind.WEIGHT, "w", weight, whole)
        recorder.program.shares = [((0,), (0,))]
        return recorder.program

    explainer = Explainer([record(True, 0.5)], record(on_one, 0.25), 0, ())
    culprits = Culprits(explainer)
    cause, *_ = explainer.explain(20.0)
    culprit = culprits.trace(culprits.make(cause), cause)
    assert (culprit.mechanism == "shared") == (not on_one)
    if not on_one:
        assert (culprit.results, culprit.copy_of, culprit.code) == (
            ("buffer/average",),
            "weight/w",
            Cause.STATE,
        )
        assert next(each.line.expression for each in culprit.origins) == "weight.detach()"


def test_a_factor_of_parts_is_named_where_it_multiplies_them() -> None:
    def add_parts(x: Tensor, *, halves: bool) -> Tensor:
        parts = [rows.exp().sum(0) for rows in x.chunk(2)]
        return torch.stack([part / 2 for part in parts] if halves else parts).sum(0)

    def run(x: Tensor, w: Tensor, *, on_ranks: bool) -> Tensor:
        total = add_parts(x, halves=True) if on_ranks else x.exp().sum(0)
        return (w.cos() + total).tanh()

    inputs = {"x": make(6, 8), "w": make(3, 8, seed=1)}
    (culprit,) = explain_call(
        lambda x, w: run(x, w, on_ranks=True), lambda x, w: run(x, w, on_ranks=False), **inputs
    )
    assert (culprit.mechanism, culprit.factor, expression_of(culprit)) == ("scale", 0.5, "part / 2")


def test_a_factor_of_parts_is_named_on_a_line_that_divides_by_one_on_one_device() -> None:
    def run(x: Tensor, w: Tensor, *, ranks: int) -> Tensor:
        parts = [rows.exp().sum(0) for rows in x.chunk(ranks)]
        total = torch.stack([part / ranks for part in parts]).sum(0)
        return (w.cos() + total).tanh()

    inputs = {"x": make(6, 8), "w": make(3, 8, seed=1)}
    (culprit,) = explain_call(partial(run, ranks=2), partial(run, ranks=1), **inputs)
    assert culprit.mechanism in ("scale", "number")
    assert expression_of(culprit) == "part / ranks"


def test_a_line_that_multiplies_each_part_twice_is_named_with_its_factor() -> None:
    def turn(part: Tensor, halves: bool) -> Tensor:
        return part.flip(0) / 2 if halves else part.flip(0)

    def run(x: Tensor, w: Tensor, *, halves: bool) -> Tensor:
        even, odd = (turn(turn(rows, halves), halves).sum(0) for rows in (x, x.exp()))
        return (w.cos() + (even + odd)).tanh()

    inputs = {"x": make(6, 8), "w": make(3, 8, seed=1)}
    (culprit,) = explain_call(partial(run, halves=True), partial(run, halves=False), **inputs)
    assert (culprit.mechanism, culprit.factor) == ("scale", 0.5)
    assert expression_of(culprit) == "part.flip(0) / 2"


def test_a_factor_that_right_results_need_is_not_named() -> None:
    x, whole = make(4, 5), Region.whole((4, 5))

    def record(factor: float) -> Program:
        recorder = Recorder()
        recorder.name_tensors({"x": x}.items())
        with recorder.recording():
            recorder.begin_step(0)
            scaled = x * factor
            recorder.observe(0, Kind.GRADIENT, "right", (scaled / factor).tanh(), whole)
            recorder.observe(0, Kind.GRADIENT, "wrong", scaled.roll(1, 0).sin(), whole)
        recorder.program.shares = [((0,), (0,))]
        return recorder.program

    explainer = Explainer([record(2.0)], record(1.0), 0, (2.0, 0.5))
    culprit = Culprits(explainer).make(explainer.explain(20.0)[0])
    assert (culprit.mechanism, expression_of(culprit)) == ("operand", "scaled.roll(1, 0).sin()")
    assert culprit.taken is not None
    assert culprit.right is not None
    assert (culprit.taken.scale, culprit.right.scale) == (2.0, 1.0)


def test_a_line_that_divides_by_a_tensor_on_one_device_has_no_number_to_compare() -> None:
    def run(x: Tensor, w: Tensor, *, ranks: int) -> Tensor:
        size = ranks if ranks > 1 else torch.tensor(1.0, dtype=torch.float64)
        parts = [rows.exp().sum(0) for rows in x.chunk(ranks)]
        total = torch.stack([part / size for part in parts]).sum(0)
        return (w.cos() + total).tanh()

    inputs = {"x": make(6, 8), "w": make(3, 8, seed=1)}
    (culprit,) = explain_call(partial(run, ranks=2), partial(run, ranks=1), **inputs)
    assert culprit.here.line is not None


@pytest.mark.parametrize(("change", "relation"), [(lambda y: y.flip(0), "moved"), (lambda y: y.tril(), "")])
def test_lost_elements_are_not_moved(change: Callable[[Tensor], Tensor], relation: str) -> None:
    one = record_call(lambda x: x.sin(), x=make(4, 4))
    explainer = Explainer([record_call(lambda x: change(x.sin()), x=make(4, 4))], one, 0, ())
    assert find_relation(explainer.alignment, explainer.wrong[0], None) == relation
