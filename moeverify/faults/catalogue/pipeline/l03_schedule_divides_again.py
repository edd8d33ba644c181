"""A pipeline divides gradients by the number of micro-batches although the loss is already normalized."""

from __future__ import annotations

from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Keep the schedule's own division, which is enabled by default."""
    from moeverify.parallel.pipeline import Pipeline, build_pipeline

    @patch.wrap(build_pipeline)
    def build_dividing(original: Original[Pipeline], *args: Any, **named: Any) -> Pipeline:
        built = original(*args, **named)
        built.schedule.scale_grads = True
        return built


FAULT = Fault(
    number="L03",
    title="gradients under a pipeline are divided by the micro-batches once more",
    source="pytorch/pytorch PR #144352; AReaL PR #1273",
    mechanism="the schedule divides by the number of micro-batches what the loss function has divided already",
    trigger="a pipeline with more than one micro-batch",
    case=make_case("l03", dp_shard=2, pp=2, micro_batches=4, stage_layers=(2, 1)),
    expected=Expected(where=(At(axis="micro-batches"),), causes=(Cause.SCALE,)),
    inject=inject,
)
