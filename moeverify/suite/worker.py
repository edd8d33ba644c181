"""What runs on the ranks: jobs that make goldens, and jobs that verify a case.

Run as `python -m moeverify.suite.worker PLAN` by the launcher, in every rank.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moeverify.case.schema import Case, Recipe
from moeverify.errors import CaseError, FormatError
from moeverify.golden.store import StoredGolden, is_stored
from moeverify.launch.plan import Job
from moeverify.launch.rank import serve
from moeverify.launch.runner import RankContext
from moeverify.suite.recording import make_golden
from moeverify.suite.verification import verify_case


def run_job(context: RankContext, job: Job) -> dict[str, Any] | None:
    """Run one job on this rank; rank 0 returns its result."""
    if job.payload["kind"] == "goldens":
        return _make_goldens(context, job)
    case = Case.model_validate_json(job.payload["case"])
    folder = Path(job.payload["cache"]) / cache_name(case.recipe, context.device, job.payload["answer"])
    if context.local_rank == 0 and not is_stored(folder):
        make_golden(case.recipe, folder, context.device)  # a node that does not share the cache
    dist.barrier()
    return verify_case(case, StoredGolden(folder), context.device, job.payload["fault"])


def _make_goldens(context: RankContext, job: Job) -> dict[str, Any] | None:
    """Make the goldens that are not cached, each on one rank, and return their summaries by fingerprint."""
    recipes = [Recipe.model_validate_json(text) for text in job.payload["recipes"]]
    for number in range(context.rank, len(recipes), context.world_size):
        recipe = recipes[number]
        answer = _make_one(recipe, context.device, job, fresh=job.payload["fresh"][number])
        context.store.set(recipe.fingerprint(), json.dumps(answer))
    if context.rank != 0:
        return None
    found = {recipe.fingerprint(): json.loads(context.store.get(recipe.fingerprint())) for recipe in recipes}
    return {"goldens": found, "device_class": device_class(context.device)}


def _make_one(recipe: Recipe, device: torch.device, job: Job, *, fresh: bool) -> dict[str, Any]:
    folder = Path(job.payload["cache"]) / cache_name(recipe, device, job.payload["answer"])
    try:
        if fresh or not is_stored(folder):
            make_golden(recipe, folder, device)
        try:
            summary = StoredGolden(folder).summary
        except FormatError:
            make_golden(recipe, folder, device)
            summary = StoredGolden(folder).summary
    except CaseError as error:
        return {"error": str(error)}
    return {"summary": summary}


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
