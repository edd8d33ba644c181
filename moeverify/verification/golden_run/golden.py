"""Creation of a recipe's golden on one device, with its noise and the summary for the file in git.

Some checks recompute the results of a rank's step from its inputs, with the recipe's optimizer and clip. A
user's step may change a gradient between the clip and the optimizer, or in an optimizer hook, as Muon does.
If the step on one device does not match these checks, and no known mistake explains the difference, the
checks have no reference for a rank. Such results are compared only with the golden.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from moeverify.cases.schema import Case, Recipe, Tolerance
from moeverify.parallel.regions.observer import Observer
from moeverify.results.checks import Kind
from moeverify.results.facts import DtypeUse, names_operation
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train
from moeverify.train.program import TrainingProgram, compute_dtype_of
from moeverify.verification.checks.base import ALONE, Check, RankRun, ShownTensors, Training, Watch
from moeverify.verification.checks.bounds import Bounds
from moeverify.verification.checks.dtype_watch import DtypeWatch
from moeverify.verification.checks.modules import list_unreproduced
from moeverify.verification.checks.narrower import name_dtype
from moeverify.verification.checks.observers import Unseen, open_observers
from moeverify.verification.checks.precision import sees_operators
from moeverify.verification.checks.rebound import UNSTEADY, ReboundWatch
from moeverify.verification.checks.registry import choose_checks
from moeverify.verification.collectives.trace import CollectiveTrace
from moeverify.verification.golden.store import Dtypes, GoldenWriter, OwnResult, StoredGolden
from moeverify.verification.golden_run.narrow_rounding import NarrowPartsWatch
from moeverify.verification.golden_run.noise import calibrate
from moeverify.verification.golden_run.nonfinite import check_finite
from moeverify.verification.golden_run.sketched import make_sketched_golden
from moeverify.verification.golden_run.soundness import check_soundness
from moeverify.verification.golden_run.summary import summarize


def record_dtypes(recipe: Recipe, device: torch.device) -> Dtypes:
    """Return the dtypes of parameters, gradients, optimizer state, module outputs and residual streams.

    All are from the first training step. Modules of a user's model that compute below float64 in a float64
    recipe are included, and in 16 bits those that one device does not reproduce.
    """
    program = assemble_single(recipe, device)
    compute = compute_dtype_of(recipe.precision)
    watch = DtypeWatch(
        program.model,
        compute,
        lambda number: (),
        sees_operators=sees_operators(recipe),
        has_own_step=recipe.step is not None,
    )
    parts = NarrowPartsWatch(program.model, [shard.tensor for shard in program.shards])
    if recipe.precision == "float64" and recipe.functions:
        program.loss_context = parts.noting
    rebound = ReboundWatch(program, compares=recipe.model.reference is None)
    _train_watched(recipe, program, watch, rebound)
    found = {sighting.key: sighting.dtype for sighting in watch.report()}
    found |= {(DtypeUse.NARROW, name, ""): name_dtype(dtype) for name, dtype in parts.found.items()}
    found |= {(UNSTEADY[0], each.name, UNSTEADY[1]): "" for each in rebound.report() if not each.kept_by}
    left_out = list_unreproduced(
        recipe, device, partial(_train_watched, recipe, num_steps=min(2, recipe.steps))
    )
    return found | {(DtypeUse.UNREPRODUCED, name, part): why for (name, part), why in left_out.items()}


def _train_watched(
    recipe: Recipe, program: TrainingProgram, *watches: Watch[Any], num_steps: int = 1
) -> None:
    with open_observers(Training(recipe, program), Unseen(), (), watches) as observer:
        train(recipe, program, observer, num_steps=num_steps)


def list_own_results(recipe: Recipe, checks: Sequence[Check[Any]], device: torch.device) -> list[OwnResult]:
    """Return the results of a user's step on one device that the checks can neither reproduce nor explain.

    A mistake that the checks can name, such as the learning rate of another step, is not included. The
    checks then report it on the ranks. Rounding may hide that a step differs from the recipe's, so the step
    also runs in float64.
    """
    if recipe.step is None:
        return []
    wide = recipe.model_copy(update={"precision": "float64", "float8": "none"})
    recipes = [recipe] if recipe == wide else [recipe, wide]
    return sorted({own for each in recipes for own in _list_in_precision(each, checks, device)})


def _list_in_precision(recipe: Recipe, checks: Sequence[Check[Any]], device: torch.device) -> set[OwnResult]:
    case = Case(name=recipe.name, recipe=recipe, layout=ALONE)
    program = assemble_single(recipe, device)
    run = RankRun(case, CollectiveTrace(), entries=list, train_again=_train_no_more)
    watches: dict[Check[Any], Watch[Any]] = {}
    for check in checks:
        watch = check.watch(run, program) if check.recomputes_step else None
        if watch is not None:
            watches[check] = watch
    with open_observers(Training(recipe, program), Unseen(), (), list(watches.values())) as observer:
        train(recipe, program, observer)
    shown = ShownTensors(
        case=case,
        coordinates={0: {}},
        tensors={},
        bounds=Bounds(Tolerance(), recipe.precision, {}),
        golden_names={},
    )
    outcomes = [check.judge(shown, [watch.report()]) for check, watch in watches.items()]
    findings = [finding for outcome in outcomes if outcome is not None for finding in outcome.findings]
    return {(each.check, each.kind, each.tensor) for each in findings if not names_operation(each.facts)}


def _train_no_more(observer: Observer, num_steps: int) -> NoReturn:
    raise RuntimeError("one device's own step is trained once")


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

    Raises: CaseError when the run is not finite, or a user's model does not have a unique answer.
    """
    if sketch:
        make_sketched_golden(recipe, folder, device)
        return
    checks = choose_checks(also=also)
    with GoldenWriter(folder) as writer:
        _record(recipe, writer, checks, device)
        reference = StoredGolden(writer.flush(), finished=False)
        check_finite(recipe, reference, device)
        if recipe.functions:
            check_soundness(recipe, reference, device)
        summary = summarize(recipe, reference)
        if recipe.precision in COARSE:
            writer.narrow()
            reference = StoredGolden(writer.flush(), finished=False)
        dtypes = record_dtypes(recipe, device)
        has_narrow_parts = any(use == DtypeUse.NARROW for use, _, _ in dtypes)
        own = list_own_results(recipe, checks, device)
        noise = calibrate(
            recipe,
            reference,
            checks,
            device,
            has_narrow_parts=has_narrow_parts,
            own_updates={name for _, kind, name in own if kind == Kind.UPDATE},
        )
        writer.finish(noise, summary, own, dtypes)


def _record(recipe: Recipe, writer: GoldenWriter, checks: Sequence[Check[Any]], device: torch.device) -> None:
    program = assemble_single(recipe, device, compute="float64")
    with open_observers(Training(recipe, program), writer, checks) as observer:
        train(recipe, program, observer, keeps_near_ties=True)
