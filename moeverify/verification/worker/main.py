"""Worker process: runs jobs that make goldens, and jobs that verify, save, load or measure a case.

The launcher runs `python -m moeverify.verification.worker.main PLAN` in every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moeverify.errors import CaseError
from moeverify.explain.fitting.order import leaving_out
from moeverify.faults.injection import check_fault
from moeverify.faults.mutation.coverage import executed_spans, write_spans
from moeverify.tools.bench.measure import measure_case
from moeverify.train.target import import_path, resolve
from moeverify.verification.golden.store import StoredGolden, is_stored
from moeverify.verification.golden_run.golden import make_golden
from moeverify.verification.golden_run.plan import plan_golden
from moeverify.verification.jobs import (
    BenchJob,
    BenchResult,
    CaseJob,
    CoverageJob,
    DebugJob,
    GoldenJob,
    LoadJob,
    PlanJob,
    PlanResult,
    RankResult,
    Refusal,
    RouteAnswer,
    RouteJob,
    SaveJob,
    read_job,
    write_result,
)
from moeverify.verification.launch.plan import Job
from moeverify.verification.launch.rank import serve
from moeverify.verification.launch.runner import RankContext
from moeverify.verification.launch.single_rank_world import single_rank_world
from moeverify.verification.worker.debug import debug_case
from moeverify.verification.worker.golden import find_damage, find_folder, make_goldens, read_error
from moeverify.verification.worker.reshard import load_case, save_case
from moeverify.verification.worker.route import follow_case
from moeverify.verification.worker.verify import verify_case

PACKAGE = Path(__file__).parents[2]


def run_job(context: RankContext, job: Job) -> dict[str, Any] | None:
    """Run one job on this rank; rank 0 returns its result, see `moeverify.verification.jobs`."""
    return write_result(_run(context, job))


def _run(context: RankContext, job: Job) -> RankResult | None:
    asked = read_job(job.payload)
    if isinstance(asked, GoldenJob):
        return make_goldens(context, asked)
    if isinstance(asked, PlanJob):
        plans = tuple(plan_golden(recipe, context.device) for recipe in asked.recipes)
        return PlanResult(plans=plans) if context.rank == 0 else None
    if isinstance(asked, BenchJob):
        return _measure(context, asked)
    if isinstance(asked, RouteJob):
        return _follow(context, asked)
    assert isinstance(asked, CaseJob)
    return _run_case(context, asked)


def _run_case(context: RankContext, job: CaseJob) -> RankResult | None:
    with import_path(job.search_path), leaving_out(job.without):
        problems: list[str] = [""] * context.world_size
        dist.all_gather_object(problems, _prepare(context, job))
        problem = next(filter(None, problems), "")
        if problem:  # every rank returns, so that none waits for another
            return Refusal(error=problem)
        case, fault = job.case, job.fault
        golden = StoredGolden(find_folder(job.golden, context.device))
        if isinstance(job, SaveJob):
            return save_case(case, golden, context.device, job.checkpoint, fault)
        if isinstance(job, LoadJob):
            return load_case(case, golden, context.device, job.checkpoint, fault)
        if isinstance(job, DebugJob):
            return debug_case(case, golden, context.device, job.at, context.trace, fault)

        def verify() -> RankResult | None:
            return verify_case(
                case,
                golden,
                context.device,
                context.trace,
                fault,
                report=lambda result: context.report(result.model_dump_json()),
                admit=context.admit,
                extend=context.extend,
                explain_seconds=job.explain_seconds,
                operators=job.operators,
            )

        if isinstance(job, CoverageJob):
            with executed_spans(PACKAGE, job.files) as spans:
                result = verify()
            write_spans(job.folder / f"rank-{context.rank}.json", spans)
            return result
        return verify()


def _measure(context: RankContext, job: BenchJob) -> RankResult | None:
    """Measure a case. A user error gives the same refusal on every rank."""
    with import_path(job.search_path):
        try:
            found = measure_case(
                job.case,
                context.device,
                context.folder,
                warmup=job.warmup,
                steps=job.steps,
                profile_folder=job.profile,
            )
        except CaseError as error:
            return Refusal(error=str(error))
    return None if found is None else BenchResult(measurement=found)


def _follow(context: RankContext, job: RouteJob) -> RankResult | None:
    """Follow the tokens of a case. A user error gives the same refusal on every rank."""
    with import_path(job.search_path):
        try:
            found = follow_case(
                job.case,
                context.device,
                layer=job.layer,
                step=job.step,
                num_shown=job.num_shown,
                fault=job.fault,
            )
        except CaseError as error:
            return Refusal(error=str(error))
    return None if found is None else RouteAnswer(result=found)


def _prepare(context: RankContext, job: CaseJob) -> str:
    """Make sure that the golden and the user's functions exist. Return an error for the user, or ""."""
    folder = find_folder(job.golden, context.device)
    if known := read_error(folder):
        return known
    try:
        # Other nodes do not share the golden cache of rank 0, which is checked before the first case.
        is_remote = context.local_rank == 0 and context.rank != 0
        if is_remote and (not is_stored(folder) or find_damage(job.case.recipe, folder)):
            with single_rank_world(context.device):
                also = job.case.checks.also
                make_golden(job.case.recipe, folder, context.device, also=also, sketch=job.sketch)
        for target, path in _list_targets(job):
            resolve(target, path)
        if job.fault is not None:
            check_fault(job.fault)
    except CaseError as error:
        return str(error)
    return ""


def _list_targets(job: CaseJob) -> Iterator[tuple[str, str]]:
    """Yield the import targets of a case's functions, each with the path of its field."""
    yield from ((target, path) for path, target in job.case.recipe.functions.items())
    if job.case.layout.parallelize is not None:
        yield job.case.layout.parallelize, "layout.parallelize"


if __name__ == "__main__":
    serve(sys.argv[1], run_job)
