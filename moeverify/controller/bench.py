"""Measures cases from the controller: each on its ranks, one after the other. No torch in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from moeverify.axes.describe import describe_layout
from moeverify.case.schema import Case
from moeverify.controller.machine import choose_device, describe_environment, most_ranks
from moeverify.controller.scratch import scratch_folder
from moeverify.controller.search_path import search_path
from moeverify.launch.launcher import run_jobs
from moeverify.launch.plan import Device, Job, JobOutcome, LaunchEvent
from moeverify.launch.world import external_world
from moeverify.results.measurement import BenchResult, Measurement
from moeverify.results.run import Event
from moeverify.validation.choices import find_obstacle

ENTRY = "moeverify.worker.main"
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
) -> BenchResult | None:
    """Return what each case costs, in their order; on any rank but the first of an external launch, None.

    Raises: MachineError where the device that was asked for is not there.
    """
    bench = _Bench(cases, choose_device(device), num_ranks, warmup, steps, timeout, on_event)
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    with scratch_folder() as folder:
        bench.execute(folder)
    if not bench.is_first:
        return None
    return BenchResult(
        environment=describe_environment(bench.device),
        started=started,
        seconds=time.monotonic() - began,
        warmup=warmup,
        steps=steps,
        cases=tuple(bench.found[case.name] for case in cases),
    )


class _Bench:
    """The state of one run: what was measured, and what still waits."""

    def __init__(
        self,
        cases: Sequence[Case],
        device: Device,
        num_ranks: int | None,
        warmup: int,
        steps: int,
        timeout: float | None,
        on_event: Callable[[Event], None],
    ) -> None:
        self.cases, self.device, self.on_event = cases, device, on_event
        self.found: dict[str, Measurement] = {}
        world = external_world()
        self.is_first = world is None or world.rank == 0
        self._timeout = timeout
        self._payload = {"kind": "bench", "warmup": warmup, "steps": steps}
        limit, why = most_ranks(device)
        if world is not None:
            limit, why = world.world_size, f"{world.launcher} started {world.world_size} ranks"
        if num_ranks is not None and num_ranks < limit:
            limit, why = num_ranks, f"--ranks {num_ranks}"
        self._runnable: list[Case] = []
        for case in cases:
            needed = case.layout.world_size
            obstacle = f"needs {needed} ranks; {why}" if needed > limit else find_obstacle(case, device)
            if obstacle:
                self._end(case, self._refuse(case, obstacle))
            else:
                self._runnable.append(case)

    def execute(self, folder: Path) -> None:
        """Measure everything that can run here."""
        jobs = [self._make_job(case) for case in self._runnable]
        if not jobs:
            return
        if external_world() is not None:
            from moeverify.launch.external import serve_external

            serve_external(jobs, folder, ENTRY, self._take, device=self.device)
            return
        for outcome in run_jobs(
            jobs, entry=ENTRY, folder=folder, device=self.device, on_event=self._on_launch
        ):
            self._take(outcome)

    def _make_job(self, case: Case) -> Job:
        payload = {**self._payload, "case": case.model_dump_json(), "search_path": search_path(case)}
        timeout = TIMEOUT if self._timeout is None else self._timeout
        return Job(name=case.name, num_ranks=case.layout.world_size, timeout=timeout, payload=payload)

    def _take(self, outcome: JobOutcome) -> None:
        case = self._runnable[outcome.index]
        if outcome.state != "done" or outcome.result is None:
            stacks = [report.summary for report in outcome.rank_reports[:1]]
            reason = "; ".join([outcome.summary, *stacks])
            self._end(case, self._refuse(case, reason))
        elif "error" in outcome.result:
            self._end(case, self._refuse(case, outcome.result["error"]))
        else:
            self._end(case, Measurement.model_validate({**self._name(case), **outcome.result}))

    def _refuse(self, case: Case, reason: str) -> Measurement:
        return Measurement.model_validate({**self._name(case), "reason": reason})

    def _name(self, case: Case) -> dict[str, object]:
        return {
            "name": case.name,
            "file": case.file,
            "ranks": case.layout.world_size,
            "layout": describe_layout(case.layout),
            "recipe": case.recipe.name,
        }

    def _end(self, case: Case, measurement: Measurement) -> None:
        self.found[case.name] = measurement

    def _on_launch(self, event: LaunchEvent) -> None:
        num_done, num_total = len(self.found), len(self.cases)
        if event.kind == "launch":
            detail = f"{event.num_ranks} ranks"
            self.on_event(Event(kind="launch", num_done=num_done, num_total=num_total, detail=detail))
        elif event.kind == "start":
            self.on_event(Event(kind="case-start", num_done=num_done, num_total=num_total, case=event.job))
