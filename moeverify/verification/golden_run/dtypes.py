"""Dtypes in which one device computes and stores, in the precision of the recipe."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from moeverify.cases.schema import Recipe
from moeverify.results.facts import Use
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train
from moeverify.train.program import Program, compute_dtype_of
from moeverify.verification.checks.base import Training, Watch
from moeverify.verification.checks.dtype_watch import DtypeWatch
from moeverify.verification.checks.modules import list_unreproduced
from moeverify.verification.checks.narrower import name_dtype
from moeverify.verification.checks.observers import Unseen, open_observers
from moeverify.verification.golden.store import Dtypes
from moeverify.verification.golden_run.narrow_rounding import NarrowParts


def record_dtypes(recipe: Recipe, device: torch.device) -> Dtypes:
    """Return the dtypes of parameters, gradients, optimizer state, module outputs and residual streams.

    They are those of the first training step. Modules of a user's model that compute below float64 in a
    float64 recipe are included, and in 16 bits those that one device does not reproduce.
    """
    program = assemble_single(recipe, device)
    watch = DtypeWatch(program.model, compute_dtype_of(recipe.precision), lambda number: ())
    parts = NarrowParts(program.model, [shard.tensor for shard in program.shards])
    if recipe.precision == "float64" and recipe.functions:
        program.loss_context = parts.noting
    _train_watched(recipe, program, watch)
    found = {sighting.key: sighting.dtype for sighting in watch.report()}
    found |= {(Use.NARROW, name, ""): name_dtype(dtype) for name, dtype in parts.found.items()}
    left_out = list_unreproduced(
        recipe, device, partial(_train_watched, recipe, num_steps=min(2, recipe.steps))
    )
    return found | {(Use.UNREPRODUCED, name, what): why for (name, what), why in left_out.items()}


def _train_watched(recipe: Recipe, program: Program, watch: Watch[Any], num_steps: int = 1) -> None:
    with open_observers(Training(recipe, program), Unseen(), (), [watch]) as observer:
        train(recipe, program, observer, num_steps=num_steps)
