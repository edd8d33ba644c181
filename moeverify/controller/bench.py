"""Measures cases from the controller: each on its ranks, one after the other. No torch in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

from moeverify.axes.describe import describe_layout
from moeverify.case.schema import Case
from moeverify.controller.machine import Machine
from moeverify.controller.obstacles import find_obstacle
from moeverify.controller.scratch import scratch_folder
from moeverify.controller.search_path import search_path
from moeverify.controller.tasks import Task, make_job, read_outcome, run_tasks
from moeverify.jobs import WORKER, BenchJob, BenchResult, Refusal
from moeverify.launch.plan import JobOutcome, LaunchEvent
from moeverify.launch.world import external_world
from moeverify.report.words.failure import describe_failure, word_report
from moeverify.report.words.note import describe_obstacle
from moeverify.results.measurement import BenchRun, Measurement
from moeverify.results.run import Event
from moeverify.validation.sweep import Combination

TIMEOUT = 900.0


def bench_cases(
    cases: Sequence[Case],
    *,
    device: Literal["auto", "cpu", "cuda"],
    num_ranks: int | None,
    warmup: int,
    steps: int,
    timeout: float | None,
    on_event: Callable[[Event], None],
    profiles: Mapping[str, Path] | None = None,
) -> BenchRun | None:
    """Return what each case costs, in their order; on any rank but the first of an external launch, None.

    `profiles` has for the name of a case the folder in which each rank leaves the trace of a step.

    Raises: MachineError where the device that was asked for is not there.
    """
    machine = Machine.find(device, "nccl", num_ranks=num_ranks)  # times of shared GPUs would say nothing
    found: dict[str, Measurement] = {}
    tasks: list[Task[Measurement]] = []
    for case in cases:
        obstacle = find_obstacle(case, machine)
        if obstacle is not None:
            found[case.name] = _refuse(case, describe_obstacle(obstacle))
        else:
            asked = BenchJob(
                case=case,
                warmup=warmup,
                steps=steps,
                profile=(profiles or {}).get(case.name),
                search_path=tuple(search_path(case)),
            )
            limit_s = TIMEOUT if timeout is None else timeout
            job = make_job(case.name, case.layout.world_size, limit_s, asked)
            tasks.append(Task(job, partial(_judge, case)))

    def on_launch(event: LaunchEvent) -> None:
        done, total = len(found), len(cases)
        if event.kind == "launch":
            on_event(Event(kind="launch", num_done=done, num_total=total, num_ranks=event.num_ranks))
        elif event.kind == "start":
            on_event(Event(kind="case-start", num_done=done, num_total=total, case=event.job))

    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    with scratch_folder() as folder:
        ran = run_tasks(tasks, entry=WORKER, folder=folder, device=machine.device, on_event=on_launch)
        for measured in ran:
            found[measured.name] = measured
    world = external_world()
    if world is not None and world.rank != 0:
        return None
    return BenchRun(
        environment=machine.describe([case.layout.world_size for case in cases]),
        started=started,
        seconds=time.monotonic() - began,
        warmup=warmup,
        steps=steps,
        cases=tuple(found[case.name] for case in cases),
    )


def mark_swept(result: BenchRun, combinations: Sequence[Combination]) -> BenchRun:
    """Return the result with the values of a sweep beside each case, and a row for each that was refused."""
    measured = {case.name: case for case in result.cases}
    rows: list[Measurement] = []
    for combination in combinations:
        swept = {"swept": combination.values}
        rows += [measured[case.name].model_copy(update=swept) for case in combination.cases]
        if combination.refused:
            reason = combination.refused.partition("\n")[0]
            rows.append(Measurement(name=combination.label, ranks=0, reason=reason, swept=combination.values))
    return result.model_copy(update={"cases": tuple(rows)})


def _judge(case: Case, outcome: JobOutcome) -> Measurement:
    """Return what was measured of a case, or why nothing was."""
    answer = read_outcome(outcome, BenchResult)
    if isinstance(answer, BenchResult):
        return answer.measurement.model_copy(update=_name(case))
    if isinstance(answer, Refusal):
        return _refuse(case, answer.error)
    first = [word_report(report).summary for report in outcome.rank_reports[:1]]
    return _refuse(case, "; ".join([describe_failure(outcome.failure), *first]))


def _refuse(case: Case, reason: str) -> Measurement:
    return Measurement.model_validate({**_name(case), "reason": reason})


def _name(case: Case) -> dict[str, object]:
    return {
        "name": case.name,
        "file": case.file,
        "ranks": case.layout.world_size,
        "layout": describe_layout(case.layout),
        "recipe": case.recipe.name,
    }
