"""A training step without observation, as in production, for measurements of speed."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.cases.schema import Recipe
from moeverify.train.data import Batch
from moeverify.train.loop import run_micro_batches
from moeverify.train.objective import count_valid
from moeverify.train.program import Program, StepInputs


def take_step(recipe: Recipe, program: Program, batches: Sequence[Batch]) -> None:
    """Train on one global batch after `engine.begin`. Collective: all ranks of the layout."""
    add_gradients(recipe, program, batches)
    update(recipe, program)


def add_gradients(recipe: Recipe, program: Program, batches: Sequence[Batch]) -> None:
    """Run all micro-batches of a step forward and backward. Collective: all ranks of the layout."""
    normalizers = count_valid(batches, program.sums, recipe.data.batch)
    program.engine.zero_grad()
    for _ in run_micro_batches(StepInputs(recipe, program, batches, normalizers, step=0)):
        pass  # the results of a micro-batch are not used


def update(recipe: Recipe, program: Program) -> None:
    """Complete and clip the gradients, and step the optimizer. Collective: all ranks of the layout."""
    program.finalize()
    if recipe.optimizer.clip_norm is not None:
        norm = program.measure_norm()
        program.engine.clip(program.shards, norm, recipe.optimizer.clip_norm)
    program.engine.step()
