"""Creation of a recipe's golden of sketches: the run layer by layer, its noise below float64, the summary."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from moeverify.cases.schema import Recipe
from moeverify.parallel.regions.observer import INITIAL
from moeverify.results.checks import ZERO_KINDS, Kind
from moeverify.train.program import ReadableState
from moeverify.train.subjects import replays_routing
from moeverify.verification.golden.noise import EPSILON, noise_key
from moeverify.verification.golden.sketched import SketchRecorder
from moeverify.verification.golden.store import GoldenWriter, StoredGolden
from moeverify.verification.golden_run.streamed import StreamedRun, StreamVisit
from moeverify.verification.golden_run.streamed_unit import Numerics
from moeverify.verification.golden_run.summary import summarize
from moeverify.verification.golden_run.update_noise import is_adaptive

# Noise of an update by an adaptive optimizer, which may change the sign of any element.
# The comparison of such updates decides nothing. The check that computes steps again decides them.
_UNKNOWN = 1.0


def measure_streamed_noise(
    recipe: Recipe, golden: SketchRecorder, reference: ReadableState, folder: Path, device: torch.device
) -> dict[str, float]:
    """Return the largest noise of each logical tensor over two runs, by `noise_key`; empty in float64.

    The runs are in the precision of the recipe, one of them with weights off by one unit in the last place. Their
    distance from the golden includes its own rounding, which a reference in float32 has too.
    Their visits are in `folder`. `reference` has the experts that the routers of the golden choose.
    """
    noise: dict[str, float] = {}
    if recipe.precision == "float64":
        return noise
    ids = reference if replays_routing(recipe) else None
    for number, nudge in enumerate((0.0, EPSILON[recipe.precision])):
        numerics = Numerics(recipe.precision, nudge)
        run = StreamedRun(recipe, numerics, device, folder / f"noise{number}", ids=ids)
        run.run()
        for (step, key), error in _measure(run.recorder, golden).items():
            kind, _, name = key.partition("/")
            if step != INITIAL:
                place = noise_key(step, kind, name)
                least = _UNKNOWN if kind == Kind.UPDATE and is_adaptive(recipe) else 0.0
                noise[place] = max(error, least, noise.get(place, 0.0))
    return noise


def _measure(recorder: SketchRecorder, golden: SketchRecorder) -> dict[tuple[int, str], float]:
    """Return the errors of a run; the largest value for kinds that are zero by definition."""
    flips = {
        place: float(tensor.abs().max())
        for place, tensor in recorder.tensors.items()
        if place[1].partition("/")[0] in ZERO_KINDS
    }
    return recorder.measure_errors(golden) | flips


def make_sketched_golden(
    recipe: Recipe,
    folder: Path,
    device: torch.device,
    *,
    on_visit: Callable[[StreamVisit, float], None] = lambda visit, seconds: None,
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
