"""Factors on all gradients that are clips or divisors, and gradients that are rounding only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from moeverify.results.checks import Kind
from moeverify.scripts.compare.coefficients import find_coefficients
from moeverify.scripts.compare.limits import make_bounds, measure_rounding
from moeverify.scripts.record.lines import Header, ShardRegion, Values
from moeverify.scripts.record.read import RankRecord, RecordedRun
from moeverify.verification.checks.bounds import Criterion, Norms


def make_run(norms: Sequence[Sequence[float]], factors: Sequence[float]) -> RecordedRun:
    """Return a run of one rank whose gradients have these norms by step, multiplied by a factor per step."""
    rank = RankRecord(Header(rank=0, world_size=1, first=0, last=len(norms) - 1), Path("run"), None)
    for step, (found, factor) in enumerate(zip(norms, factors, strict=True)):
        for number, norm in enumerate(found):
            for kind in (Kind.GRADIENT, Kind.UPDATE):
                line = Values(
                    step=step,
                    kind=kind,
                    name=f"{number}.weight",
                    where=ShardRegion(shape=(4,)),
                    squares=(norm * factor) ** 2,
                    before=norm,
                )
                rank.values[step, kind, line.name] = line
    return RecordedRun(Path("run"), [rank])


NORMS = [[1.0, 2.0], [3.0, 2.0], [2.0, 5.0]]


@pytest.mark.parametrize(
    ("factors", "is_undone"),
    [
        ((0.25, 0.25, 0.25), False),  # micro-batches
        ((0.25, 0.25, 0.5), False),  # a shorter last window
        ((0.0371, 0.0371, 0.0371), False),  # a constant
        ((0.031, 0.029, 0.030), False),  # numbers of tokens
        ((0.447214, 0.277350, 0.185695), True),  # a clip to a norm of 1
        ((1.0, 0.277, 1.0), True),  # a clip that binds once
    ],
)
def test_a_divisor_is_a_part_of_the_gradients_and_a_clip_is_not(
    factors: Sequence[float], is_undone: bool
) -> None:
    run, other = make_run(NORMS, factors), make_run(NORMS, [1.0] * 3)
    for expected, actual in ((run, other), (other, run)):
        found = find_coefficients(expected, actual, 1)
        wanted = factors[1] if is_undone else 1.0
        assert found[id(run.ranks[0]), 1].value == pytest.approx(wanted)


def test_one_step_shows_a_divisor_by_its_value_only() -> None:
    for factor, wanted in ((0.125, 1.0), (0.277, 0.277)):
        run = make_run([NORMS[0]], [factor])
        assert find_coefficients(run, run, 0)[id(run.ranks[0]), 0].value == pytest.approx(wanted)


def test_updates_by_gradients_that_are_rounding_only_have_no_bound() -> None:
    run = make_run([[1.0, 1e-10, 0.0], [1.0, 1e-2, 0.0]], [1.0, 1.0])
    for noise in (None, {}):
        bounds = make_bounds("float32", noise, 0, measure_rounding(run))
        limits = [
            bounds.bound((step, Kind.UPDATE, f"{number}.weight"), Criterion(), Norms(1e-3, 1e-3))
            for step in (0, 1)
            for number in (0, 1, 2)
        ]
        assert [limit > 1.0 for limit in limits] == [
            False,
            True,
            False,
        ] * 2  # moments keep the first gradient
        moment = bounds.bound((1, Kind.OPTIMIZER_STATE, "1.weight.exp_avg"), Criterion(), Norms(1.0, 1.0))
        assert moment > 1.0
