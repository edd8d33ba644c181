"""The order of calls in a user's own step: violations are found on their ranks and in their steps."""

from __future__ import annotations

from typing import Any, cast

import pytest

from moeverify.results.finding import Finding
from moeverify.results.script import CallFacts, CallRule
from moeverify.train.calls.call import LoopCall
from moeverify.verification.checks.base import ShownTensors
from moeverify.verification.checks.calls import RankCalls, judge_calls

RIGHT = ("zero_grad", "backward", "backward", "clip_grad_norm_", "optimizer step", "scheduler step")


def make_calls(*names: str, kept: float = 0.0) -> tuple[LoopCall, ...]:
    first = names.index("backward") if "backward" in names else -1
    return tuple(
        LoopCall(
            step=0,
            name=name,
            site=f"train.py:{place}",
            discarded=1.5 if name == "zero_grad" else 0.0,
            kept=kept if place == first else 0.0,  # recorded at the first backward pass
        )
        for place, name in enumerate(names)
    )


def judge(*by_rank: dict[int, tuple[LoopCall, ...]], num_micro_batches: int = 2) -> tuple[Finding, ...]:
    reports = [RankCalls(steps, num_micro_batches) for steps in by_rank]
    coordinates = {rank: {"dp_shard": rank} for rank in range(len(reports))}
    shown = ShownTensors(coordinates, {}, cast(Any, None), case=cast(Any, None), golden_names={})
    return judge_calls(shown, reports).findings


@pytest.mark.parametrize(
    ("names", "options", "rule", "site"),
    [
        (("backward", "zero_grad", "backward", "optimizer step"), {}, CallRule.DISCARDED, 1),
        (RIGHT[1:], {"kept": 2.0}, CallRule.KEPT, 0),
        (("backward", "clip_grad_value_", "backward", "optimizer step"), {}, CallRule.EARLY_CLIP, 1),
        (("backward", "scheduler step", "backward", "optimizer step"), {}, CallRule.INNER_SCHEDULER, 1),
    ],
)
def test_each_rule_is_found_with_its_line(
    names: tuple[str, ...], options: dict[str, Any], rule: CallRule, site: int
) -> None:
    right = make_calls(*RIGHT)
    (finding,) = judge({0: right, 1: right}, {0: right, 1: make_calls(*names, **options)})
    assert isinstance(finding.facts, CallFacts)
    assert (finding.facts.rule, finding.facts.site) == (rule, f"train.py:{site}")
    assert (finding.step, finding.ranks, finding.coordinates) == (1, (1,), {"dp_shard": 1})


def test_a_right_order_is_silent() -> None:
    assert judge({0: make_calls(*RIGHT)}, {0: make_calls(*RIGHT)}) == ()


def test_two_passes_for_each_micro_batch_are_another_algorithm() -> None:
    # Sharpness-aware minimization: the first passes determine where the second ones are computed.
    names = ("backward", "backward", "zero_grad", "backward", "backward", "optimizer step")
    assert judge({0: make_calls(*names)}) == ()
