"""Time measurements of cases, one after the other on their ranks. Does not import torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from moeverify.cases.axes.describe import describe_layout
from moeverify.cases.schema import Case
from moeverify.cases.validation.sweep import Combination
from moeverify.report.words.failure import describe_failure, word_report
from moeverify.report.words.note import describe_obstacle
from moeverify.results.measurement import BenchRun, Measurement
from moeverify.results.run import Event
from moeverify.verification.controller.machine import Machine
from moeverify.verification.controller.obstacles import find_obstacle
from moeverify.verification.controller.scratch import scratch_folder
from moeverify.verification.controller.search_path import search_path
from moeverify.verification.controller.tasks import Task, make_job, read_outcome, run_tasks
from moeverify.verification.jobs import WORKER, BenchJob, BenchResult, Refusal
from moeverify.verification.launch.plan import JobOutcome, LaunchEvent
from moeverify.verification.launch.world import external_world

TIMEOUT = 900.0


class Bench:
    """Measurement of several cases in order. `measured` maps the name of each finished case to its result.

    If the run ends early, `result` contains the measurements so far. `profiles` maps the name of a case to
    the folder in which each rank writes the trace of one step.

    Raises: MachineError when the requested device does not exist.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        *,
        device: Literal["auto", "cpu", "cuda"],
        num_ranks: int | None,
        warmup: int,
        steps: int,
        timeout: float | None,
        profiles: Mapping[str, Path] | None = None,
    ) -> None:
        # NCCL requires one GPU per rank: timings of GPUs shared by ranks would be meaningless.
        self._machine = Machine.find(device, "nccl", num_ranks=num_ranks)
        self._cases = cases
        self._warmup, self._steps = warmup, steps
        self._limit_s = TIMEOUT if timeout is None else timeout
        self._profiles = profiles or {}
        self._started, self._began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
        self.measured: dict[str, Measurement] = {}

    def run(self, on_event: Callable[[Event], None]) -> None:
        """Measure each case, and emit an event when its measurement is known."""
        tasks = []
        for case in self._cases:
            obstacle = find_obstacle(case, self._machine)
            if obstacle is None:
                tasks.append(self._make_task(case))
            else:
                self._take(_refuse(case, describe_obstacle(obstacle)), on_event)

        def on_launch(event: LaunchEvent) -> None:
            if event.kind == "launch":
                on_event(self._make_event("launch", num_ranks=event.num_ranks))
            elif event.kind == "start":
                on_event(self._make_event("case-start", case=event.job))

        with scratch_folder() as folder:
            ran = run_tasks(
                tasks, entry=WORKER, folder=folder, device=self._machine.device, on_event=on_launch
            )
            with closing(ran):
                for measured in ran:
                    self._take(measured, on_event)

    @property
    def result(self) -> BenchRun | None:
        """Return the measurements in the order of the cases.

        Return None on ranks other than 0 of an external launch.

        A case that has not finished has a reason instead of a measurement.
        """
        world = external_world()
        if world is not None and world.rank != 0:
            return None
        missing = "it was not over when the command ended"
        return BenchRun(
            environment=self._machine.describe([case.layout.world_size for case in self._cases]),
            started=self._started,
            seconds=time.monotonic() - self._began,
            warmup=self._warmup,
            steps=self._steps,
            cases=tuple(self.measured.get(case.name) or _refuse(case, missing) for case in self._cases),
        )

    def _make_task(self, case: Case) -> Task[Measurement]:
        asked = BenchJob(
            case=case,
            warmup=self._warmup,
            steps=self._steps,
            profile=self._profiles.get(case.name),
            search_path=tuple(search_path(case)),
        )
        job = make_job(case.name, case.layout.world_size, self._limit_s, asked)
        return Task(job, partial(_judge, case))

    def _take(self, measured: Measurement, on_event: Callable[[Event], None]) -> None:
        self.measured[measured.name] = measured
        on_event(self._make_event("case-end", case=measured.name, measured=measured))

    def _make_event(self, kind: Literal["launch", "case-start", "case-end"], **rest: Any) -> Event:
        return Event(kind=kind, num_done=len(self.measured), num_total=len(self._cases), **rest)


def mark_swept(result: BenchRun, combinations: Sequence[Combination]) -> BenchRun:
    """Return the result with the sweep values of each case, and one row for each rejected combination."""
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
    """Return the measurement of a case, or the reason for its absence."""
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
