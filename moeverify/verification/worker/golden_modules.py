"""Readings at the modules of the single-device model in one step."""

from __future__ import annotations

import torch

from moeverify.cases.schema import Recipe
from moeverify.explain.fitting.capture import Capture
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train
from moeverify.train.module_taps import Reading, Tap
from moeverify.verification.golden.store import StoredGolden
from moeverify.verification.worker.step_tap import StepTap


def read_golden_modules(
    recipe: Recipe, golden: StoredGolden, step: int, device: torch.device
) -> list[Reading]:
    """Return the module readings of the single-device model in `step`, starting from the golden's state.

    The model computes in float64. No collective.
    """
    program = assemble_single(recipe, device, compute="float64")
    batch = recipe.data
    tap = Tap(program.model, batch.batch, batch.seq_len, scale=1.0, limit=1 << 62)
    observer = StepTap(Capture(()), tap, step)
    train(recipe, program, observer, golden=golden, num_steps=step + 1)
    observer.close()
    return tap.readings
