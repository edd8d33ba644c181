"""Worker process: runs jobs that make goldens, and jobs that verify, save, load or measure a case.

The launcher runs `python -m moeverify.verification.worker.main PLAN` in every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moeverify.cases.schema import Case, Recipe
from moeverify.errors import CaseError
from moeverify.explain.fitting.order import leaving_out
from moeverify.faults.injection import check_fault
from moeverify.faults.mutation.coverage import executed_spans, write_spans
from moeverify.parallel.policies import without_policies
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
    RankJob,
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
from moeverify.verification.worker.leftovers import ProcessState
from moeverify.verification.worker.reshard import load_case, save_case
from moeverify.verification.worker.route import follow_case
from moeverify.verification.worker.verify import verify_case

PACKAGE = Path(__file__).parents[2]
OWN = f"{PACKAGE.name}."


def run_job(context: RankContext, job: Job) -> dict[str, Any] | None:
    """Run one job on this rank; rank 0 returns its result, see `moeverify.verification.jobs`."""
    asked = read_job(job.payload)
    cases = [asked.case] if isinstance(asked, CaseJob | BenchJob | RouteJob) else []
    recipes = [order.recipe for order in asked.orders] if isinstance(asked, GoldenJob) else []
    targets = [target for target, _ in _list_targets(cases, recipes)]
    state = None if all(target.startswith(OWN) for target in targets) else ProcessState()
    _forget_compiled()
    result = write_result(_run(context, asked, state))
    if state is not None and state.find_lasting_changes():
        context.retire()
    return result


def _forget_compiled() -> None:
    """Forget the compiled code of earlier jobs: it counts toward the recompilation limit of a function."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def _run(context: RankContext, asked: RankJob, state: ProcessState | None) -> RankResult | None:
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
    return _run_case(context, asked, state)


def _run_case(context: RankContext, job: CaseJob, state: ProcessState | None) -> RankResult | None:
    policies = without_policies() if job.widened else nullcontext()
    with import_path(job.search_path), leaving_out(job.without), policies:
        problems: list[str] = [""] * context.world_size
        dist.all_gather_object(problems, _prepare(context, job))
        problem = next(filter(None, problems), "")
        if problem:  # every rank returns, so that none waits for another
            return Refusal(error=problem)
        if state is not None:
            state.note_functions()
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
        for target, path in _list_targets([job.case]):
            resolve(target, path)
        if job.fault is not None:
            check_fault(job.fault)
    except CaseError as error:
        return str(error)
    return ""


def _list_targets(cases: Sequence[Case], recipes: Sequence[Recipe] = ()) -> Iterator[tuple[str, str]]:
    """Yield the import targets of the functions of cases and recipes, each with the path of its field."""
    for recipe in (*(case.recipe for case in cases), *recipes):
        yield from ((target, path) for path, target in recipe.functions.items())
    for case in cases:
        if case.layout.parallelize is not None:
            yield case.layout.parallelize, "layout.parallelize"


if __name__ == "__main__":
    serve(sys.argv[1], run_job)
