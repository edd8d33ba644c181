"""A training step with nobody watching: what a production run would do, for measuring how fast it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from moeverify.case.schema import Recipe
from moeverify.train.clipping import clip_gradients, gradient_norm
from moeverify.train.data import Batch
from moeverify.train.forward import compute_losses
from moeverify.train.objective import Normalizers, count_valid
from moeverify.train.pipeline import run_pipeline
from moeverify.train.program import Program


def take_step(recipe: Recipe, program: Program, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """Train on one global batch. Collective: all ranks of the layout."""
    normalizers = count_valid(batches, program.sums, recipe.data.batch)
    optimizer.zero_grad(set_to_none=True)
    if program.pipeline is None:
        _accumulate_gradients(recipe, program, batches, normalizers)
    else:
        for _ in run_pipeline(recipe, program, batches, normalizers, step=0, ids=None):
            pass  # what it saw of each micro-batch
    program.finalize()
    if recipe.optimizer.clip_norm is not None:
        counted = program.holdings if program.counted is None else program.counted
        norm = gradient_norm(counted, program.sum_over_shards, program.sum_over_stages)
        clip_gradients(program.holdings, norm, recipe.optimizer.clip_norm)
    optimizer.step()


def _accumulate_gradients(
    recipe: Recipe, program: Program, batches: Sequence[Batch], normalizers: Normalizers
) -> None:
    for number, batch in enumerate(batches):
        with program.accumulate(number == len(batches) - 1), program.loss_context():
            losses, _ = compute_losses(recipe, program, batch, normalizers)
            torch.autograd.backward(losses.total * program.scale)
