"""Dtypes in which one device computes and stores, in the precision of the recipe."""

from __future__ import annotations

import torch

from moeverify.cases.schema import Recipe
from moeverify.results.facts import Use
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train
from moeverify.train.program import compute_dtype_of
from moeverify.verification.checks.base import Training
from moeverify.verification.checks.dtype_watch import DtypeWatch
from moeverify.verification.checks.narrower import name_dtype
from moeverify.verification.checks.observers import Unseen, open_observers
from moeverify.verification.golden.store import Dtypes
from moeverify.verification.golden_run.narrow_rounding import NarrowParts


def record_dtypes(recipe: Recipe, device: torch.device) -> Dtypes:
    """Return the dtypes of parameters, gradients, optimizer state, module outputs and residual streams.

    They are those of the first training step. In float64 the modules of a user's model that compute below
    float64 are included.
    """
    program = assemble_single(recipe, device)
    watch = DtypeWatch(program.model, compute_dtype_of(recipe.precision), lambda number: ())
    parts = NarrowParts(program.model, [shard.tensor for shard in program.shards])
    if recipe.precision == "float64" and recipe.functions:
        program.loss_context = parts.noting
    with open_observers(Training(recipe, program), Unseen(), (), [watch]) as observer:
        train(recipe, program, observer, num_steps=1)
    found = {sighting.key: sighting.dtype for sighting in watch.report()}
    return found | {(Use.NARROW, name, ""): name_dtype(dtype) for name, dtype in parts.found.items()}
