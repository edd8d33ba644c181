"""Creation of a recipe's golden of sketches: the run layer by layer, its noise, and the summary."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from moeverify.cases.schema import Recipe
from moeverify.verification.golden.store import GoldenWriter, StoredGolden
from moeverify.verification.golden_run.streamed import StreamedRun, Visit
from moeverify.verification.golden_run.streamed_noise import measure_streamed_noise
from moeverify.verification.golden_run.streamed_unit import Numerics
from moeverify.verification.golden_run.summary import summarize


def make_sketched_golden(
    recipe: Recipe,
    folder: Path,
    device: torch.device,
    *,
    on_visit: Callable[[Visit, float], None] = lambda visit, seconds: None,
) -> None:
    """Write the golden of a recipe as sketches, in the precision of its reference.

    The visits are in `FOLDER.visits` until the golden is written. A golden that was interrupted goes on there.
    `moeverify.cases.validation.sketch` has the recipes for which this is possible.
    """
    visits = folder.with_name(f"{folder.name}.visits")
    run = StreamedRun(recipe, Numerics(recipe.reference), device, visits, on_visit=on_visit)
    run.run()
    with GoldenWriter(folder) as writer:
        run.recorder.write(writer)
        reference = StoredGolden(writer.flush(), finished=False)
        reference.sketches = run.recorder.shapes
        noise = measure_streamed_noise(recipe, run.recorder, reference, visits, device)
        writer.finish(noise, summarize(recipe, reference), sketches=run.recorder.shapes)
    shutil.rmtree(visits)
