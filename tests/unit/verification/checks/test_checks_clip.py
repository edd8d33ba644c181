"""Norms and clip coefficients against the gradients that ranks have, each logical element counted once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause
from moeverify.train import program
from moeverify.verification.checks.base import CheckOutcome
from moeverify.verification.checks.clip import GradientWatch, judge_norms

SGD = {"name": "sgd", "lr": 0.1, "clip_norm": 0.2}
SHAPE = (8, 6)
HALVES = [Region.box(SHAPE, [range(4), range(6)]), Region.box(SHAPE, [range(4, 8), range(6)])]
Judge = Callable[..., CheckOutcome]


@pytest.fixture
def judge(run_ranks: Callable, make_one_device_case: Callable) -> Judge:
    """Return a function that judges the reports of two ranks."""

    def do(reports: list[Any], precision: str = "float64") -> CheckOutcome:
        shown = run_ranks({0: {}, 1: {}}).shown(make_one_device_case(SGD, precision))
        return judge_norms(shown, reports)

    return do


def note(
    gradients: Mapping[str, tuple[Tensor, Region]],
    norm: float,
    coefficient: float | None = None,
    *,
    norms_are_wide: bool = False,
) -> Any:
    """Return one rank's report of these gradients and its norm, in their dtype or float32."""
    watch = GradientWatch(norms_are_wide=norms_are_wide)
    watch.begin_step(0)
    dtype = torch.float32 if norms_are_wide else next(iter(gradients.values()))[0].dtype
    for name, (local, region) in gradients.items():
        watch.observe(0, "gradient", name, local, region)
    scalar = Region.whole(())
    watch.observe(0, "gradient_norm", "total", torch.tensor(norm, dtype=dtype), scalar)
    found = min(1.0, 0.2 / (norm + 1e-6)) if coefficient is None else coefficient
    watch.observe(0, "gradient_norm", "clip_coefficient", torch.tensor(found, dtype=dtype), scalar)
    return watch.report()


def test_shards_are_added_and_replicas_count_once(judge: Judge, weight: Tensor) -> None:
    bias = torch.ones(3, dtype=torch.float64)
    norm = float((weight.square().sum() + 3.0).sqrt())
    ranks = [note({"w": (half.take(weight), half), "b": (bias, Region.whole((3,)))}, norm) for half in HALVES]
    assert judge(ranks).findings == ()


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
def test_a_norm_without_one_family_is_found_in_every_precision(
    judge: Judge, weight: Tensor, precision: str
) -> None:
    dtype = getattr(torch, precision)
    experts = 0.5 * weight
    gradients = {"w": (weight.to(dtype), Region.whole(SHAPE)), "e": (experts.to(dtype), Region.whole(SHAPE))}
    right = float((weight.square().sum() + experts.square().sum()).sqrt())
    assert judge([note(gradients, right)] * 2, precision).findings == ()
    wrong = judge([note(gradients, float(weight.norm()))] * 2, precision)
    (finding,) = wrong.findings
    assert (finding.tensor, finding.code, finding.ranks) == ("total", Cause.NORM, (0, 1))
    assert finding.scale == pytest.approx(1.25**-0.5, rel=0.01)


def test_a_norm_of_one_rank_alone_is_found_there(judge: Judge, weight: Tensor) -> None:
    whole = {"w": (weight, Region.whole(SHAPE))}
    norm = float(weight.norm())
    (finding,) = judge([note(whole, norm), note(whole, 2.0 * norm)]).findings
    assert (finding.rank, finding.ranks) == (1, (1,))


def test_a_coefficient_of_another_norm_is_found(judge: Judge, weight: Tensor) -> None:
    whole = {"w": (weight, Region.whole(SHAPE))}
    (finding,) = judge([note(whole, float(weight.norm()), coefficient=1.0)]).findings
    assert finding.tensor == "clip_coefficient"


def test_a_norm_that_is_no_number_is_found(judge: Judge, weight: Tensor) -> None:
    whole = {"w": (weight, Region.whole(SHAPE))}
    assert judge([note(whole, float("nan"))]).result.verdict == "mismatch"


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16", "mixed"])
def test_the_norms_of_a_real_run_pass(
    judge: Judge, train_alone: Callable, make_one_device_case: Callable, precision: str
) -> None:
    report = train_alone(
        make_one_device_case(SGD, precision), lambda program: GradientWatch(norms_are_wide=True)
    )
    outcome = judge([report], precision)
    assert outcome.findings == ()
    assert outcome.result.tensors == 6


def test_what_a_wide_norm_counts_twice_is_found_far_below_the_rounding_of_the_gradients(
    judge: Judge, weight: Tensor
) -> None:
    small = (0.01 * weight[:1]).to(torch.bfloat16)
    gradients = {"w": (weight.to(torch.bfloat16), Region.whole(SHAPE)), "s": (small, Region.whole((1, 6)))}
    square = float(gradients["w"][0].double().square().sum())
    right, twice = (square + count * float(small.double().square().sum()) for count in (1, 2))
    assert twice / right - 1.0 < 2.0**-13
    assert judge([note(gradients, right**0.5, norms_are_wide=True)]).findings == ()
    (finding,) = judge([note(gradients, twice**0.5, norms_are_wide=True)]).findings
    assert (finding.tensor, finding.bound < 1e-5) == ("total", True)
    assert judge([note(gradients, twice**0.5)]).findings == ()


def test_a_norm_without_the_last_tensor_is_found_in_a_real_run(
    judge: Judge, train_alone: Callable, make_one_device_case: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm_of = program.gradient_norm
    monkeypatch.setattr(program, "gradient_norm", lambda shards, *rest: norm_of(shards[:-1], *rest))
    report = train_alone(
        make_one_device_case(SGD, "bfloat16"), lambda program: GradientWatch(norms_are_wide=True)
    )
    assert {finding.tensor for finding in judge([report], "bfloat16").findings} == {"total"}


def test_a_norm_may_count_any_of_the_replicas_that_differ(judge: Judge, weight: Tensor) -> None:
    """Two ranks without a gradient reduction: each clips by its own norm, or both by one of them."""
    whole, norm = Region.whole(SHAPE), float(weight.norm())

    def judge_norms_of(*factors: float) -> tuple[Any, ...]:
        reports = [
            note({"w": (own * weight, whole)}, factor * norm)
            for own, factor in zip((1.0, 1.5), factors, strict=True)
        ]
        return judge(reports).findings

    for right in ((1.0, 1.5), (1.0, 1.0), (1.5, 1.5)):
        assert judge_norms_of(*right) == ()
    (finding,) = judge_norms_of(0.9, 1.6)
    assert finding.ranks == (0, 1)


def test_a_norm_beyond_all_replicas_of_the_peers_is_found(judge: Judge, weight: Tensor) -> None:
    """Two shards: ranks 1 and 2 hold different replicas of the second; rank 0 may count either."""
    first, second = HALVES
    mine, theirs = (half.take(weight) for half in HALVES)
    square, others = float(mine.square().sum()), float(theirs.square().sum())
    peers = [
        note({"w": (factor * theirs, second)}, (square + factor**2 * others) ** 0.5) for factor in (1.0, 2.0)
    ]

    def judge_rank_0(counted: float) -> tuple[Any, ...]:
        return judge([note({"w": (mine, first)}, (square + counted * others) ** 0.5), *peers]).findings

    assert judge_rank_0(1.0) == judge_rank_0(4.0) == ()
    for wrong in (0.9, 4.1):
        (finding,) = judge_rank_0(wrong)
        assert finding.ranks == (0,)
