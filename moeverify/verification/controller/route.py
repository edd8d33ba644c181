"""`moeverify route`: follows one batch through a MoE layer of each case.

Does not import torch in this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from moeverify.cases.axes.describe import describe_layout
from moeverify.cases.axes.expert_placement import list_moe_layers
from moeverify.cases.schema import Case
from moeverify.errors import CaseError, Problem
from moeverify.report.words.failure import describe_failure, word_report
from moeverify.report.words.note import describe_obstacle
from moeverify.results.route import RouteReport
from moeverify.verification.controller.machine import Machine
from moeverify.verification.controller.obstacles import find_obstacle
from moeverify.verification.controller.scratch import scratch_folder
from moeverify.verification.controller.search_path import search_path
from moeverify.verification.controller.tasks import Task, make_job, read_outcome, run_tasks
from moeverify.verification.jobs import WORKER, Refusal, RouteAnswer, RouteJob
from moeverify.verification.launch.plan import Backend, JobOutcome
from moeverify.verification.launch.world import external_world

TIMEOUT = 300.0


def follow_cases(
    cases: Sequence[Case],
    *,
    layer: int | None,
    step: int,
    num_shown: int,
    fault: str | None,
    device: Literal["auto", "cpu", "cuda"],
    backend: Backend,
    timeout: float | None,
) -> list[RouteReport] | None:
    """Return the routing of one batch in each case, in order. Without `layer`, follow the first MoE layer.

    Return None on ranks other than 0 of an external launch. Units: `timeout` in seconds.

    Raises: CaseError when a case has no such layer; MachineError when the requested device does not exist.
    """
    layers = _choose_layers(cases, layer, step)
    machine = Machine.find(device, backend)
    found: dict[str, RouteReport] = {}
    tasks: list[Task[RouteReport]] = []
    for case in cases:
        obstacle = find_obstacle(case, machine)
        if obstacle is not None:
            found[case.name] = _report(case, reason=describe_obstacle(obstacle))
            continue
        asked = RouteJob(
            case=case,
            layer=layers[case.name],
            step=step,
            num_shown=num_shown,
            fault=fault,
            search_path=tuple(search_path(case)),
        )
        job = make_job(case.name, case.layout.world_size, TIMEOUT if timeout is None else timeout, asked)
        tasks.append(Task(job, partial(_judge, case)))
    with scratch_folder() as folder:
        for report in run_tasks(
            tasks,
            entry=WORKER,
            folder=folder,
            device=machine.device,
            backend=backend,
            on_event=lambda event: None,
        ):
            found[report.case] = report
    world = external_world()
    if world is not None and world.rank != 0:
        return None
    return [found[case.name] for case in cases]


def _choose_layers(cases: Sequence[Case], layer: int | None, step: int) -> dict[str, int]:
    """Return the layer to follow in each case.

    Raises: CaseError when any case lacks the layer; the error lists all such cases.
    """
    problems, layers = [], {}
    for case in cases:
        reference, file = case.recipe.model.reference, case.file
        known = () if reference is None else list_moe_layers(reference)
        if reference is None or case.layout.parallelize is not None:
            message = "a model or parallel code of your own cannot be followed"
            remedy = "use a case with a preset or the reference model, or `moeverify place` on its `--trace`"
            problems.append(Problem(message, path="recipe.model", remedy=remedy, file=file))
        elif not known:
            message, remedy = "no layer has experts", "use a case whose model has `moe`"
            problems.append(Problem(message, path="recipe.model.moe", remedy=remedy, file=file))
        elif case.layout.experts == "megablocks":
            message = "the package's own block routes and computes in one call, which cannot be looked into"
            problems.append(
                Problem(message, path="layout.experts", remedy="--set layout.experts=loop", file=file)
            )
        elif layer is not None and layer not in known:
            message = f"layer {layer} has no experts"
            remedy = f"write one of {', '.join(map(str, known))}"
            problems.append(Problem(message, path="--layer", remedy=remedy, file=file))
        elif step >= case.recipe.steps:
            message = f"the recipe has {case.recipe.steps} steps"
            remedy = f"write a step from 0 to {case.recipe.steps - 1}"
            problems.append(Problem(message, path="--step", remedy=remedy, file=file))
        else:
            layers[case.name] = known[0] if layer is None else layer
    if problems:
        raise CaseError(problems)
    return layers


def _judge(case: Case, outcome: JobOutcome) -> RouteReport:
    answer = read_outcome(outcome, RouteAnswer)
    if isinstance(answer, RouteAnswer):
        return _report(case).model_copy(update={"result": answer.result})
    if isinstance(answer, Refusal):
        return _report(case, reason=answer.error)
    first = [word_report(report).summary for report in outcome.rank_reports[:1]]
    return _report(case, reason="; ".join([describe_failure(outcome.failure), *first]))


def _report(case: Case, reason: str = "") -> RouteReport:
    return RouteReport(
        case=case.name,
        ranks=case.layout.world_size,
        recipe=case.recipe.name,
        layout=describe_layout(case.layout),
        reason=reason,
    )
