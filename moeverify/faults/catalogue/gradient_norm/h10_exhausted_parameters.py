"""The clip iterates over a generator of parameters that the norm has exhausted, so it clips nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage


def inject(patch: Patch) -> None:
    """Share one iterator over the parameters between norm and clip."""
    from moeverify.cases.schema import Recipe
    from moeverify.parallel.regions.observer import Observer
    from moeverify.train.loop import clip
    from moeverify.train.program import Program

    @patch.wrap(clip)
    def clip_exhausted(
        original: Original[None], recipe: Recipe, program: Program, observer: Observer, step: int
    ) -> None:
        once: Any = iter(program.shards)
        original(recipe, replace(program, shards=once, counted=once), observer, step)


FAULT = Fault(
    number="H10",
    title="gradients are never clipped",
    source="pytorch/torchtitan PR #1258 (775a486ed)",
    mechanism="model.parameters() is a generator, exhausted by the norm when the gradients are to be scaled",
    trigger="any",
    case=make_case("h10", preset="tiny-gpt", dp_shard=2),
    expected=Expected(where=(At(stage=Stage.CLIP), At(stage=Stage.GRADIENT_NORM)), causes=(Cause.NORM,)),
    inject=inject,
    is_moe=False,
    notes="norm and coefficient are reported right; what is wrong is that the coefficient is not applied",
)
