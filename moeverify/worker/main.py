"""What runs on the ranks: jobs that make goldens, and jobs that verify a case.

Run as `python -m moeverify.worker.main PLAN` by the launcher, in every rank.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moeverify.bench.measure import measure_case
from moeverify.case.schema import Case, Recipe
from moeverify.errors import CaseError, FormatError
from moeverify.faults.injection import find_fault
from moeverify.golden.store import StoredGolden, is_stored
from moeverify.launch.plan import Job, write_atomically
from moeverify.launch.rank import serve
from moeverify.launch.runner import RankContext
from moeverify.layout.observer import INITIAL
from moeverify.train.target import describe_error, import_path, resolve
from moeverify.worker.golden import make_golden
from moeverify.worker.reshard import load_case, save_case
from moeverify.worker.verify import verify_case


def run_job(context: RankContext, job: Job) -> dict[str, Any] | None:
    """Run one job on this rank; rank 0 returns its result, or the `error` that the user can mend."""
    if job.payload["kind"] == "goldens":
        return _make_goldens(context, job)
    case = Case.model_validate_json(job.payload["case"])
    if job.payload["kind"] == "bench":
        return _measure(context, job, case)
    folder = Path(job.payload["cache"]) / cache_name(case.recipe, context.device, job.payload["answer"])
    with import_path(job.payload["search_path"]):
        problems: list[str] = [""] * context.world_size
        dist.all_gather_object(problems, _prepare(case, folder, job.payload["fault"], context))
        problem = next(filter(None, problems), "")
        if problem:  # known on every rank, so that none waits for another
            return {"error": problem}
        golden = StoredGolden(folder)
        if job.payload["kind"] in ("save", "load"):
            act = save_case if job.payload["kind"] == "save" else load_case
            place = Path(job.payload["checkpoint"])
            return act(case, golden, context.device, place, job.payload["fault"])
        return verify_case(case, golden, context.device, context.trace, job.payload["fault"])


def _measure(context: RankContext, job: Job, case: Case) -> dict[str, Any] | None:
    """Measure a case; what the user must mend is the same on every rank."""
    with import_path(job.payload["search_path"]):
        try:
            return measure_case(
                case,
                context.device,
                context.folder,
                warmup=job.payload["warmup"],
                steps=job.payload["steps"],
            )
        except CaseError as error:
            return {"error": str(error)}


def _prepare(case: Case, folder: Path, fault: str | None, context: RankContext) -> str:
    """Make sure that golden and functions are there; return what the user must mend, or nothing."""
    known = _error_file(folder)
    if known.exists():
        return known.read_text()
    try:
        if context.local_rank == 0 and not is_stored(folder):
            make_golden(case.recipe, folder, context.device)  # a node that does not share the cache
        for target, path in _targets(case):
            resolve(target, path)
        if fault is not None:
            find_fault(fault)
    except CaseError as error:
        return str(error)
    return ""


def _targets(case: Case) -> Iterator[tuple[str, str]]:
    """Yield the functions that a case names, each with the path of its field."""
    yield from ((target, path) for path, target in case.recipe.model.functions.items())
    if case.layout.parallelize is not None:
        yield case.layout.parallelize, "layout.parallelize"


def _make_goldens(context: RankContext, job: Job) -> dict[str, Any] | None:
    """Make the goldens that are not cached, each on one rank, and return their summaries by fingerprint."""
    recipes = [Recipe.model_validate_json(text) for text in job.payload["recipes"]]
    for number in range(context.rank, len(recipes), context.world_size):
        recipe = recipes[number]
        with import_path(job.payload["search_paths"][number]):
            answer = _make_one(recipe, context.device, job, fresh=job.payload["fresh"][number])
        context.store.set(recipe.fingerprint(), json.dumps(answer))
    if context.rank != 0:
        return None
    found = {recipe.fingerprint(): json.loads(context.store.get(recipe.fingerprint())) for recipe in recipes}
    return {"goldens": found, "device_class": device_class(context.device)}


def _make_one(recipe: Recipe, device: torch.device, job: Job, *, fresh: bool) -> dict[str, Any]:
    folder = Path(job.payload["cache"]) / cache_name(recipe, device, job.payload["answer"])
    _error_file(folder).unlink(missing_ok=True)
    try:
        if fresh or not is_stored(folder):
            make_golden(recipe, folder, device)
        try:
            summary = _read_summary(recipe, folder)
        except FormatError:
            make_golden(recipe, folder, device)
            summary = _read_summary(recipe, folder)
    except CaseError as error:
        return _note_error(folder, str(error))
    except Exception as error:
        if not recipe.model.functions:
            raise
        text = f"one device cannot train `{recipe.model.title}`: {describe_error(error)}"
        return _note_error(folder, text)
    return {"summary": summary}


def _read_summary(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Return the summary of a full golden, all of whose files can be read."""
    golden = StoredGolden(folder)
    for step in range(INITIAL, recipe.steps):
        golden.keys(step)
    return golden.summary


def _note_error(folder: Path, text: str) -> dict[str, str]:
    """Leave word for the cases that need this golden, so that none of them tries again."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(_error_file(folder), text)
    return {"error": text}


def _error_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.error")


def device_class(device: torch.device) -> str:
    """Return the name of the kind of device: goldens of different kinds differ in rounding."""
    if device.type == "cpu":
        return "cpu"
    return re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(device)).strip("-").lower()


def cache_name(recipe: Recipe, device: torch.device, answer: str) -> str:
    """Return the name of the folder that holds a recipe's full golden."""
    return f"{recipe.fingerprint()}-{device_class(device)}-{answer}"


if __name__ == "__main__":
    serve(sys.argv[1], run_job)
