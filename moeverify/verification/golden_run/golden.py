"""Creation of a recipe's golden on one device, with its noise and the summary for the file in git."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from moeverify.cases.schema import Recipe
from moeverify.results.facts import Use
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train
from moeverify.verification.checks.base import Check, Training
from moeverify.verification.checks.observers import open_observers
from moeverify.verification.checks.registry import choose_checks
from moeverify.verification.golden.store import GoldenWriter, StoredGolden
from moeverify.verification.golden_run.dtypes import record_dtypes
from moeverify.verification.golden_run.noise import calibrate
from moeverify.verification.golden_run.own_step import list_own_results
from moeverify.verification.golden_run.sketched import make_sketched_golden
from moeverify.verification.golden_run.soundness import check_soundness
from moeverify.verification.golden_run.summary import summarize

# Precisions with a rounding of 2**-9, against which the rounding of float32, 2**-25, is negligible.
COARSE = ("bfloat16", "mixed")


def make_golden(
    recipe: Recipe,
    folder: Path,
    device: torch.device,
    *,
    also: Collection[str] = (),
    sketch: bool = False,
) -> None:
    """Write the full golden of a recipe: the float64 run, and the noise of the recipe's precision.

    `folder` is the folder of this golden, and `device` a single device. `also` names optional checks; the
    tensors that they compare are recorded too. With `sketch`, write sketches from a run layer by layer.

    Raises: CaseError when a user's model does not have a unique answer (see `check_soundness`).
    """
    if sketch:
        make_sketched_golden(recipe, folder, device)
        return
    checks = choose_checks(also=also)
    with GoldenWriter(folder) as writer:
        _record(recipe, writer, checks, device)
        reference = StoredGolden(writer.flush(), finished=False)
        if recipe.functions:
            check_soundness(recipe, reference, device)
        summary = summarize(recipe, reference)
        if recipe.precision in COARSE:
            writer.narrow()
            reference = StoredGolden(writer.flush(), finished=False)
        dtypes = record_dtypes(recipe, device)
        has_narrow_parts = any(use == Use.NARROW for use, _, _ in dtypes)
        noise = calibrate(recipe, reference, checks, device, has_narrow_parts=has_narrow_parts)
        writer.finish(noise, summary, list_own_results(recipe, checks, device), dtypes)


def _record(recipe: Recipe, writer: GoldenWriter, checks: Sequence[Check[Any]], device: torch.device) -> None:
    program = assemble_single(recipe, device, compute="float64")
    with open_observers(Training(recipe, program), writer, checks) as observer:
        train(recipe, program, observer)
