"""A training step with nobody watching: what a production run would do, for measuring how fast it is."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from moeverify.case.schema import Recipe
from moeverify.train.clipping import clip_gradients, gradient_norm
from moeverify.train.data import Batch
from moeverify.train.loop import accumulate_gradients
from moeverify.train.objective import count_valid
from moeverify.train.pipeline import run_pipeline
from moeverify.train.program import Program


def take_step(recipe: Recipe, program: Program, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """Train on one global batch. Collective: all ranks of the layout."""
    normalizers = count_valid(batches, program.sums, recipe.data.batch)
    optimizer.zero_grad(set_to_none=True)
    run = accumulate_gradients if program.pipeline is None else run_pipeline
    for _ in run(recipe, program, batches, normalizers, 0, None):
        pass  # what it saw of each micro-batch
    program.finalize()
    if recipe.optimizer.clip_norm is not None:
        counted = program.holdings if program.counted is None else program.counted
        norm = gradient_norm(counted, program.sum_over_shards, program.sum_over_stages)
        clip_gradients(program.holdings, norm, recipe.optimizer.clip_norm)
    optimizer.step()
