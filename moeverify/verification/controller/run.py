"""Execution of cases: goldens first, then each case on its ranks. Does not import torch in this process."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from moeverify.cases.axes.describe import describe_layout
from moeverify.cases.schema import Case, Checks, CustomModel, Precision
from moeverify.report.operator_file import name_file
from moeverify.report.words.check import word_check
from moeverify.report.words.failure import describe_failure, word_report
from moeverify.report.words.note import (
    describe_dependent_obstacle,
    describe_golden,
    describe_missing_save,
    describe_obstacle,
    describe_search,
    describe_sharing,
    describe_undecided,
    describe_unused_loop,
    list_notes,
)
from moeverify.results.finding import CheckResult, Verdict, find_undecided, note_failure
from moeverify.results.golden import GoldenState
from moeverify.results.observation import DiagnosisFailed
from moeverify.results.obstacle import Obstacle
from moeverify.results.run import CaseResult, Declared, Event, GoldenTime, RankReport, RunResult
from moeverify.stale_folders import remove_abandoned
from moeverify.verification.controller.goldens import GOLDENS, GoldenSet
from moeverify.verification.controller.machine import Machine
from moeverify.verification.controller.mesh import make_shape
from moeverify.verification.controller.obstacles import find_obstacle
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.scratch import scratch_folder
from moeverify.verification.controller.search_path import search_path
from moeverify.verification.controller.separation import suggest_layout
from moeverify.verification.controller.tasks import Task, make_job, read_outcome, run_tasks
from moeverify.verification.jobs import (
    WORKER,
    CaseJob,
    GoldenEnd,
    GoldenResult,
    Refusal,
    VerifyJob,
    VerifyResult,
    read_report,
)
from moeverify.verification.launch.plan import Job, JobOutcome, LaunchEvent
from moeverify.verification.launch.world import external_world

OnEvent = Callable[[Event], None]


def pass_results(take: Callable[[CaseResult], None], on_event: OnEvent) -> OnEvent:
    """Return an event handler that passes each case result to `take`, then every event to `on_event`."""

    def handle(event: Event) -> None:
        if event.kind == "case-end" and event.result is not None:
            take(event.result)
        on_event(event)

    return handle


@dataclass(frozen=True)
class CaseTask:
    """A case and its job: `make` creates the job from the fields common to all case jobs.

    `needs` names the task that this one depends on. `labels` are additional fields of the result.
    """

    case: Case
    make: Callable[..., CaseJob] = VerifyJob
    fault: str | None = None
    needs: str = ""
    labels: Mapping[str, Any] = field(default_factory=dict)


def run_cases(cases: Sequence[Case], options: RunOptions, on_event: OnEvent) -> RunResult | None:
    """Return the verdicts of all cases in order, or None on ranks other than 0 of an external launch.

    Raises: MachineError when the requested device does not exist.
    """
    machine = find_machine(options)
    with run_folder(options.folder) as folder:
        return run_case_tasks(make_tasks(cases, options), options, machine, folder, on_event)


def find_machine(options: RunOptions) -> Machine:
    """Return the device, backend and rank limit of a run.

    Raises: MachineError when the requested device does not exist.
    """
    return Machine.find(options.device, options.backend, num_ranks=options.num_ranks)


def make_tasks(cases: Sequence[Case], options: RunOptions) -> list[CaseTask]:
    """Return the tasks that verify these cases, each with its fault."""
    return [CaseTask(case, fault=options.case_faults.get(case.name, options.fault)) for case in cases]


def run_case_tasks(
    tasks: Sequence[CaseTask], options: RunOptions, machine: Machine, folder: Path, on_event: OnEvent
) -> RunResult | None:
    """Return the results of all tasks in order, or None on ranks other than 0 of an external launch."""
    run = CaseRun(tasks, options, machine, on_event)
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    for _ in run.execute(folder):
        pass  # the caller gets the result from the event
    return run.make_result(started, time.monotonic() - began)


def stream_cases(cases: Sequence[Case], options: RunOptions, on_event: OnEvent) -> Generator[CaseResult]:
    """Yield the verdict of each case when it is known. The ranks do not wait for the consumer.

    Closing the iterator ends all ranks and removes their temporary files. In an external launch only rank 0
    yields results.

    Raises: MachineError when the requested device does not exist.
    """
    run = CaseRun(make_tasks(cases, options), options, find_machine(options), on_event)
    with run_folder(options.folder) as folder, closing(run.execute(folder)) as results:
        yield from results


@contextmanager
def run_folder(wanted: Path | None) -> Iterator[Path]:
    """Yield the log folder inside `wanted`, with old logs removed, or else a temporary folder."""
    if wanted is None:
        with scratch_folder() as folder:
            yield folder
        return
    logs = wanted / "logs"
    world = external_world()
    if world is None or world.rank == 0:
        shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True, exist_ok=True)
    try:
        yield logs
    finally:
        remove_abandoned(logs.rglob("*.partial"))


class CaseRun:
    """The state of one run: the goldens and case results so far."""

    def __init__(
        self, tasks: Sequence[CaseTask], options: RunOptions, machine: Machine, on_event: OnEvent
    ) -> None:
        self.options = options
        self.results: dict[str, CaseResult] = {}
        self._tasks = {task.case.name: task for task in tasks}
        self._machine = machine
        self._on_event = on_event
        self._num_launches = 0
        self._start_seconds = 0.0
        self._launched: float | None = None  # the time of a launch that has begun no job yet
        self._obstacles = {
            name: obstacle
            for name, task in self._tasks.items()
            if (obstacle := find_obstacle(task.case, machine)) is not None
        }
        runnable = [task for task in tasks if not self._find_reason_to_skip(task)]
        self._runnable = runnable
        self._goldens = GoldenSet.of([task.case for task in runnable], options)
        self._states: dict[Path, GoldenState] = {}
        # By case name: the checks before the search for causes, which may lose the ranks.
        self._early: dict[str, VerifyResult] = {}
        self._golden_failure = ""
        self._golden_reports: tuple[RankReport, ...] = ()

    def execute(self, folder: Path) -> Generator[CaseResult]:
        """Run all tasks and yield each result when it is known."""
        for task in self._tasks.values():
            if reason := self._find_reason_to_skip(task):
                yield self._end(task, self._make_case_result(task, "skipped", reason))
        if not self._runnable:
            return
        yield from self._run(self._goldens, folder)
        if self._may_retry:
            # The function of one recipe may have ended the ranks of all goldens.
            for number, alone in enumerate(self._goldens.split()):
                self._golden_failure = ""
                yield from self._run(alone, folder / f"golden-{number}")

    @property
    def _may_retry(self) -> bool:
        """Return whether the goldens failed together, and each can be made in ranks of its own."""
        return bool(self._golden_failure) and len(self._goldens.orders) > 1 and external_world() is None

    def _run(self, goldens: GoldenSet, folder: Path) -> Generator[CaseResult]:
        """Make these goldens, run the tasks that need them, and yield each result when it is known."""
        own = [task for task in self._runnable if self._goldens.folders[task.case.name] in goldens.orders]
        first = Task[CaseResult | None](
            goldens.job(self._count_golden_ranks(goldens)),
            lambda outcome: self._take_goldens(goldens, outcome),
        )
        judged = run_tasks(
            [first, *(Task(self._make_job(task), self._make_judge(task)) for task in own)],
            entry=WORKER,
            folder=folder,
            device=self._machine.device,
            backend=self.options.backend,
            on_event=self._on_launch,
            timeout=self.options.timeout,
        )
        with self._goldens.swept(), closing(judged):
            for result in judged:
                if result is not None:
                    yield result
                elif goldens is self._goldens and self._may_retry:
                    return

    def make_result(self, started: str, seconds: float) -> RunResult | None:
        """Return the verdicts of all tasks in order, or None on ranks other than 0 of an external launch."""
        world = external_world()
        if world is not None and world.rank != 0:
            return None
        results = tuple(self.results[name] for name in self._tasks)
        return RunResult(
            verdict=find_overall_verdict(results),
            environment=self._machine.describe(case.ranks for case in results if case.verdict != "skipped"),
            started=started,
            seconds=seconds,
            launches=self._num_launches,
            start_seconds=self._start_seconds,
            goldens=tuple(
                GoldenTime(recipe=state.recipe, seconds=state.seconds)
                for state in self._states.values()
                if state.seconds is not None
            ),
            cases=results,
        )

    def _find_reason_to_skip(self, task: CaseTask) -> str:
        """Return why a task cannot run here, or an empty string. A load cannot run if its save cannot."""
        obstacle = self._obstacles.get(task.case.name)
        if obstacle is not None:
            return describe_obstacle(obstacle)
        of_needed: Obstacle | None = self._obstacles.get(task.needs)
        return "" if of_needed is None else describe_dependent_obstacle(task.labels["saved_by"], of_needed)

    def _count_golden_ranks(self, goldens: GoldenSet) -> int:
        """Return the number of ranks that compute goldens in parallel, at most as many as the cases need."""
        widest = max(task.case.layout.world_size for task in self._runnable)
        most = 2 if self._machine.device == "cpu" else widest
        return max(1, min(widest, len(goldens.orders), most))

    def _make_job(self, task: CaseTask) -> Job:
        case, folder = task.case, self.options.folder
        asked = task.make(
            case=case,
            golden=self._goldens.folders[case.name],
            sketch=self._goldens.is_sketch(case.name),
            fault=task.fault,
            search_path=tuple(search_path(case)),
            explain_seconds=self.options.explain_seconds,
            operators=None if folder is None else name_file(folder.resolve(), case.name),
            without=self.options.without,
            widened=self.options.widened,
        )
        timeout = self.options.timeout if self.options.timeout is not None else case.checks.timeout
        return make_job(case.name, case.layout.world_size, timeout, asked)

    def _take_goldens(self, goldens: GoldenSet, outcome: JobOutcome) -> None:
        answer = read_outcome(outcome, GoldenResult)
        if answer is None or isinstance(answer, Refusal):
            self._golden_failure = describe_failure(outcome.failure)
            self._golden_reports = outcome.rank_reports
            return
        for folder, found in zip(goldens.orders, answer.goldens, strict=True):
            self._states[folder] = self._goldens.examine(folder, found, answer.device_class)

    def _make_judge(self, task: CaseTask) -> Callable[[JobOutcome], CaseResult | None]:
        return lambda outcome: self._end(task, self._judge(task, outcome))

    def _judge(self, task: CaseTask, outcome: JobOutcome) -> CaseResult:
        """Return the verdict of a case whose job has ended."""
        if self._golden_failure:
            reason = f"the goldens could not be made: {self._golden_failure}"
            return self._make_case_result(
                task, "error", reason, outcome, rank_reports=_word_reports(self._golden_reports)
            )
        state = self._states[self._goldens.folders[task.case.name]]
        is_missing_fine = state.status == "missing" and not self.options.require_goldens
        if state.status != "recorded" and not is_missing_fine:
            return self._make_case_result(task, "error", describe_golden(state), outcome)
        needed = self.results.get(task.needs)
        answer = read_outcome(outcome, VerifyResult) or self._early.get(task.case.name)
        if isinstance(answer, VerifyResult):
            return self._judge_answer(task, answer, state, outcome)
        reports = _word_reports(outcome.rank_reports)
        if needed is not None and needed.verdict != "pass":
            reason = describe_missing_save(needed.name)
        else:
            reason = answer.error if answer is not None else describe_failure(outcome.failure)
        return self._make_case_result(task, "error", reason, outcome, rank_reports=reports)

    def _judge_answer(
        self, task: CaseTask, answer: VerifyResult, state: GoldenState, outcome: JobOutcome
    ) -> CaseResult:
        checks = tuple(map(word_check, answer.checks))
        found = answer.findings
        if outcome.failure is not None:
            # The ranks were lost during the search for causes. The results of the checks were reported
            # before.
            found = tuple(note_failure(found, DiagnosisFailed(message=describe_failure(outcome.failure))))
        verdict, declared = apply_declared_differences(task.case.checks, checks, task.case.recipe.precision)
        asks = verdict == "pass" and self.options.must_decide
        undecided = find_undecided(checks) if asks else []
        return self._make_case_result(
            task,
            "undecided" if undecided else verdict,
            describe_undecided(undecided),
            outcome,
            checks=checks,
            findings=tuple(suggest_layout(task.case, finding, self._machine.limit.most) for finding in found),
            notes=(
                *list_notes(checks, declared, state),
                *describe_unused_loop(
                    verdict,
                    is_own_model=isinstance(task.case.recipe.model, CustomModel),
                    step=task.case.recipe.step,
                ),
                *describe_sharing(
                    task.case.layout.world_size, self._machine.num_gpus, external_world() is not None
                ),
            ),
            rank_reports=_word_reports(outcome.rank_reports),
            losses=answer.losses,
            load=answer.load,
            gradient_norms=answer.gradient_norms,
            learning_rates=answer.learning_rates,
            timeline=answer.timeline,
            errors=answer.errors,
            operators=answer.operators,
            stages=answer.stages,
            bounds=answer.bounds,
            choices=answer.choices,
        )

    def _make_case_result(
        self, task: CaseTask, verdict: Verdict, reason: str, outcome: JobOutcome | None = None, **rest: Any
    ) -> CaseResult:
        case = task.case
        return CaseResult(
            name=case.name,
            file=case.file,
            verdict=verdict,
            reason=reason,
            ranks=case.layout.world_size,
            seconds=outcome.seconds if outcome is not None else 0.0,
            recipe=case.recipe.name,
            layout=describe_layout(case.layout),
            mesh=make_shape(case.layout) if verdict in ("mismatch", "error") else None,
            **task.labels,
            **rest,
        )

    def _end(self, task: CaseTask, result: CaseResult) -> CaseResult:
        self.results[task.case.name] = result
        self._emit("case-end", case=task.case.name, result=result)
        return result

    def _on_launch(self, event: LaunchEvent) -> None:
        if event.kind == "start" and self._launched is not None:
            self._start_seconds += time.monotonic() - self._launched
            self._launched = None
        if event.kind == "launch":
            self._num_launches += 1
            self._launched = time.monotonic()
            self._emit("launch", num_ranks=event.num_ranks)
        elif event.kind == "up":
            self._emit("up", num_ranks=event.num_ranks)
        elif event.kind == "lost":
            self._emit("lost")
        elif event.kind == "report":
            self._take_report(event)
        elif event.kind == "start" and event.job == GOLDENS:
            self._emit("golden", recipes=self._goldens.recipes)
        elif event.kind == "start":
            self._emit("case-start", case=event.job)

    def _take_report(self, event: LaunchEvent) -> None:
        """Keep and show the early result of a case, or show that a golden has ended."""
        known = read_report(event.detail)
        if isinstance(known, GoldenEnd):
            done, total = known.num_done, known.num_total
            self._on_event(Event(kind="golden-end", case=known.recipe, num_done=done, num_total=total))
            return
        assert isinstance(known, VerifyResult)
        if event.job not in self._early and self.options.explain_seconds:
            self._emit("work", note=describe_search(event.job, self.options.explain_seconds))
        self._early[event.job] = known

    def _emit(
        self, kind: Literal["launch", "up", "lost", "golden", "case-start", "case-end", "work"], **rest: Any
    ) -> None:
        self._on_event(Event(kind=kind, num_done=len(self.results), num_total=len(self._tasks), **rest))


def _word_reports(reports: Sequence[RankReport]) -> tuple[RankReport, ...]:
    return tuple(map(word_report, reports))


def find_overall_verdict(results: Sequence[CaseResult]) -> Any:
    """Return the verdict of a run: the first of `error`, `mismatch`, `undecided` that a case has, or `pass`."""
    verdicts = {result.verdict for result in results}
    return next((verdict for verdict in ("error", "mismatch", "undecided") if verdict in verdicts), "pass")


def apply_declared_differences(
    wanted: Checks, checks: Sequence[CheckResult], precision: Precision = "float64"
) -> tuple[Verdict, Declared | None]:
    """Return the verdict of a case and the state of its declaration.

    A case with a declaration passes if exactly the declared checks differ. One declaration serves all precisions:
    a check that is not made in this one, such as `modules` in float64, may be declared. Rounding may hide the
    difference from some checks: below float64 one is enough.
    """
    found = {check.name for check in checks if check.verdict == "mismatch"}
    if not wanted.differs:
        return ("mismatch" if found else "pass"), None
    differ = tuple(name for name in wanted.differs if name in found)
    hidden = () if precision == "float64" else wanted.differs
    required = {check.name for check in checks}.difference(hidden) if differ else wanted.differs
    declared = Declared(
        names=wanted.differs,
        differ=differ,
        equal=tuple(name for name in wanted.differs if name in required and name not in found),
        has_more=bool(found - set(wanted.differs)),
        because=wanted.because,
    )
    return ("mismatch" if declared.equal or declared.has_more else "pass"), declared
