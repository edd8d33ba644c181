"""Runs cases from the controller: goldens first, then every case, each on its ranks; no torch in this process."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moeverify.axes.describe import describe_layout
from moeverify.case.schema import Case
from moeverify.controller.declared import settle
from moeverify.controller.goldens import GoldenSet, GoldenState
from moeverify.controller.machine import choose_device, describe_environment, most_ranks
from moeverify.controller.options import RunOptions
from moeverify.controller.scratch import scratch_folder
from moeverify.controller.search_path import search_path
from moeverify.controller.separation import propose
from moeverify.launch.launcher import run_jobs
from moeverify.launch.plan import Device, Job, JobOutcome, LaunchEvent
from moeverify.launch.world import external_world
from moeverify.results.finding import BLIND, CheckResult, Finding, Verdict
from moeverify.results.run import CaseResult, Event, RunResult
from moeverify.validation.choices import find_obstacle

ENTRY = "moeverify.worker.main"

OnEvent = Callable[[Event], None]


def run_cases(cases: Sequence[Case], options: RunOptions, on_event: OnEvent) -> RunResult | None:
    """Return the verdicts of all cases, in their order; on any rank but the first of an external launch, None.

    Raises: MachineError where the device that was asked for is not there.
    """
    device = choose_device(options.device)
    run = CaseRun(cases, options, device, on_event)
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    with run_folder(options.folder) as folder:
        for _ in run.execute(folder):
            pass  # the caller hears of it by the event
    return run.conclude(started, began)


def stream_cases(cases: Sequence[Case], options: RunOptions, on_event: OnEvent) -> Generator[CaseResult]:
    """Yield the verdict of each case as soon as it is known; the ranks go on while nobody asks for the next.

    Closing the iterator ends all ranks and removes what they wrote. Ranks of an external launch yield nothing,
    except the first.

    Raises: MachineError where the device that was asked for is not there.
    """
    run = CaseRun(cases, options, choose_device(options.device), on_event)
    with run_folder(options.folder) as folder, closing(run.execute(folder)) as results:
        yield from results


@contextmanager
def run_folder(wanted: Path | None) -> Iterator[Path]:
    """Give the folder to keep, with old logs removed, or a temporary one that is gone afterwards."""
    if wanted is None:
        with scratch_folder() as folder:
            yield folder
        return
    logs = wanted / "logs"
    world = external_world()
    if world is None or world.rank == 0:
        shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True, exist_ok=True)
    yield logs


class CaseRun:
    """The state of one run: which cases still wait, and what came of the others."""

    def __init__(self, cases: Sequence[Case], options: RunOptions, device: Device, on_event: OnEvent) -> None:
        self.cases = cases
        self.options = options
        self.device: Device = device
        self.on_event = on_event
        self.results: dict[str, CaseResult] = {}
        self.num_launches = 0
        world = external_world()
        self.is_first = world is None or world.rank == 0
        self._runnable: list[Case] = []
        self._states: dict[str, GoldenState] = {}

    def execute(self, folder: Path) -> Generator[CaseResult]:
        """Run everything and yield each result as soon as it is known."""
        self._skip_unrunnable()
        yield from list(self.results.values())
        if not self._runnable:
            return
        self._goldens = GoldenSet.of(self._runnable, self.options)
        jobs = [self._goldens.job(self._golden_ranks()), *map(self.make_job, self._runnable)]
        if external_world() is not None:
            self._execute_external(jobs, folder)
            yield from [self.results[case.name] for case in self._runnable if self.is_first]
            return
        outcomes = run_jobs(jobs, entry=ENTRY, folder=folder, device=self.device, on_event=self._on_launch)
        with closing(outcomes):
            for outcome in outcomes:
                self._take(outcome)
                if outcome.index > 0:
                    yield self.results[self._runnable[outcome.index - 1].name]

    def conclude(self, started: str, began: float) -> RunResult | None:
        """Return the verdicts of all cases in their order; None on any rank but the first."""
        if not self.is_first:
            return None
        results = tuple(self.results[case.name] for case in self.cases)
        return RunResult(
            verdict=_overall(results),
            environment=describe_environment(self.device),
            started=started,
            seconds=time.monotonic() - began,
            launches=self.num_launches,
            cases=results,
        )

    def _execute_external(self, jobs: Sequence[Job], folder: Path) -> None:
        from moeverify.launch.external import serve_external

        serve_external(jobs, folder, ENTRY, self._take, device=self.device)

    def _skip_unrunnable(self) -> None:
        limit, why = most_ranks(self.device)
        world = external_world()
        if world is not None:
            limit, why = world.world_size, f"{world.launcher} started {world.world_size} ranks"
        if self.options.num_ranks is not None and self.options.num_ranks < limit:
            limit, why = self.options.num_ranks, f"--ranks {self.options.num_ranks}"
        self._most_ranks, self._why_no_more = limit, why
        for case in self.cases:
            if reason := self.find_obstacle(case):
                self._end(case, self._result(case, "skipped", reason))
            else:
                self._runnable.append(case)

    def find_obstacle(self, case: Case) -> str:
        """Return why a case cannot run here, or nothing."""
        needed = case.layout.world_size
        if needed > self._most_ranks:
            return f"needs {needed} ranks; {self._why_no_more}"
        return find_obstacle(case, self.device)

    def _golden_ranks(self) -> int:
        """Return how many ranks make goldens side by side: no more than the cases need anyway."""
        widest = max(case.layout.world_size for case in self._runnable)
        return max(1, min(widest, len(self._goldens.recipes), 2 if self.device == "cpu" else widest))

    def make_job(self, case: Case) -> Job:
        """Return what the ranks do for a case."""
        timeout = self.options.timeout if self.options.timeout is not None else case.checks.timeout
        payload = {
            "kind": "case",
            **self.say_more(case),
            "case": case.model_dump_json(),
            "cache": str(self._goldens.cache),
            "answer": self._goldens.answer,
            "fault": self.options.case_faults.get(case.name, self.options.fault),
            "search_path": search_path(case),
        }
        return Job(name=case.name, num_ranks=case.layout.world_size, timeout=timeout, payload=payload)

    def say_more(self, case: Case) -> dict[str, Any]:
        """Return what the ranks are told beyond the case itself."""
        return {}

    def _on_launch(self, event: LaunchEvent) -> None:
        if event.kind == "launch":
            self.num_launches += 1
            self._tell("launch", detail=f"{event.num_ranks} ranks")
        elif event.kind == "start" and event.job == "goldens":
            self._tell("golden", detail=f"{len(self._goldens.recipes)} recipes on one device each")
        elif event.kind == "start":
            self._tell("case-start", event.job)

    def _take(self, outcome: JobOutcome) -> None:
        if outcome.index == 0:
            self._take_goldens(outcome)
            return
        case = self._runnable[outcome.index - 1]
        self._end(case, self.judge(case, outcome))

    def _take_goldens(self, outcome: JobOutcome) -> None:
        if outcome.state != "done" or outcome.result is None:
            message = f"the goldens could not be made: {outcome.summary}"
            self._states = dict.fromkeys(
                (recipe.fingerprint() for recipe in self._goldens.recipes), GoldenState("failed", message)
            )
            self._golden_reports = outcome.rank_reports
            return
        found: Mapping[str, Any] = outcome.result["goldens"]
        device_class = outcome.result["device_class"]
        for recipe in self._goldens.recipes:
            print_ = recipe.fingerprint()
            self._states[print_] = self._goldens.examine(recipe, found[print_], device_class)

    def judge(self, case: Case, outcome: JobOutcome) -> CaseResult:
        """Return the verdict of a case whose job has ended."""
        state = self._states[case.recipe.fingerprint()]
        missing_is_fine = state.status == "missing" and not self.options.require_goldens
        if state.status != "recorded" and not missing_is_fine:
            reports = getattr(self, "_golden_reports", ())
            return self._result(case, "error", state.message, outcome, rank_reports=reports)
        if outcome.state != "done" or outcome.result is None:
            verdict: Verdict = "error"
            return self._result(case, verdict, outcome.summary, outcome, rank_reports=outcome.rank_reports)
        if "error" in outcome.result:
            return self._result(case, "error", outcome.result["error"], outcome)
        checks = tuple(CheckResult.model_validate(check) for check in outcome.result["checks"])
        found = (Finding.model_validate(finding) for finding in outcome.result["findings"])
        findings = tuple(propose(case, finding, self._most_ranks) for finding in found)
        verdict, notes = settle(case.checks, checks)
        notes += tuple(note for check in checks if (note := describe_blind(check)))
        notes += tuple(check.unseen for check in checks if check.unseen)
        notes += (state.message,) if state.status == "missing" else ()
        notes += (state.nearness,) if state.nearness else ()
        losses = tuple((expected, actual) for expected, actual in outcome.result["losses"])
        return self._result(
            case, verdict, "", outcome, checks=checks, findings=findings, notes=notes, losses=losses
        )

    def _result(
        self, case: Case, verdict: Verdict, reason: str, outcome: JobOutcome | None = None, **rest: Any
    ) -> CaseResult:
        return CaseResult(
            name=case.name,
            file=case.file,
            verdict=verdict,
            reason=reason,
            ranks=case.layout.world_size,
            seconds=outcome.seconds if outcome is not None else 0.0,
            recipe=case.recipe.name,
            layout=describe_layout(case.layout),
            **rest,
        )

    def _end(self, case: Case, result: CaseResult) -> None:
        self.results[case.name] = result
        self._tell("case-end", case.name, result=result)

    def _tell(self, kind: Any, case: str = "", **rest: Any) -> None:
        num_done = len(self.results)
        self.on_event(Event(kind=kind, num_done=num_done, num_total=len(self.cases), case=case, **rest))


def describe_blind(check: CheckResult) -> str:
    """Return a note where a check could not really verify some of its tensors, else nothing."""
    if not check.blind:
        return ""
    noun = "1 tensor" if check.blind == 1 else f"{check.blind} tensors"
    return (
        f"{noun} of {check.name} {'has' if check.blind == 1 else 'have'} a bound above {BLIND}, of "
        f"{check.tensors}: nothing was verified there"
    )


def _overall(results: Sequence[CaseResult]) -> Any:
    verdicts = {result.verdict for result in results}
    return next((verdict for verdict in ("error", "mismatch") if verdict in verdicts), "pass")
