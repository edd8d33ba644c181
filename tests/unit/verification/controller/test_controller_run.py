"""The controller's handling of outcomes: failed goldens, saves that loads need, and early verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from moeverify.cases.schema import Case
from moeverify.cases.validation.load import load_cases
from moeverify.report.words.run import word_case
from moeverify.results.failure import EndKind, FailureCause, JobFailure, RankEnd
from moeverify.results.finding import CheckResult, Finding
from moeverify.results.observation import DiagnosisFailed
from moeverify.results.run import CaseResult, Event, RankReport
from moeverify.verification.controller import tasks
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.reshard import LayoutPair, plan_tasks, run_pairs
from moeverify.verification.controller.run import run_cases
from moeverify.verification.jobs import (
    GoldenEnd,
    GoldenJob,
    GoldenResult,
    GoldenSummary,
    LoadJob,
    RankResult,
    Refusal,
    SaveJob,
    VerifyJob,
    VerifyResult,
    read_job,
    write_result,
)
from moeverify.verification.launch.plan import Job, JobOutcome, LaunchEvent

CASES = Path(__file__).parents[4] / "cases"
SUMMARY = GoldenSummary(losses={}, tensors={})
RAISED = RankEnd(how=EndKind.RAISED, error="ValueError: no")
FAILURE = JobFailure(cause=FailureCause.RANK, rank=1, end=RAISED)
PASSED = VerifyResult(checks=(CheckResult(name="loss", verdict="pass", tensors=3),), losses=((1.0, 1.0),))
DIFFERS = VerifyResult(
    checks=(CheckResult(name="loss", verdict="mismatch", tensors=3, inconclusive=2),),
    findings=(Finding(check="loss", kind="loss", tensor="total", step=0, rank=0, error=1.0, bound=0.0),),
)

Answers = Mapping[str, RankResult | JobFailure]


class Ranks:
    """Ranks with scripted responses; `jobs` are those that they received."""

    def __init__(
        self, answers: Answers, early: Mapping[str, VerifyResult] | None = None, breaks: str = ""
    ) -> None:
        self.jobs: list[Job] = []
        self._answers = answers
        self._breaks = breaks  # a recipe whose function ends the ranks of its golden
        self._early = early or {}

    def run(self, jobs: Sequence[Job], *, on_event: Any, **_: Any) -> Iterator[JobOutcome]:
        on_event(LaunchEvent(kind="launch", num_ranks=2))
        for index, job in enumerate(jobs):
            self.jobs.append(job)
            on_event(LaunchEvent(kind="start", job=job.name))
            if job.name in self._early:
                detail = self._early[job.name].model_dump_json()
                on_event(LaunchEvent(kind="report", job=job.name, detail=detail))
            asked = read_job(job.payload)
            orders = asked.orders if isinstance(asked, GoldenJob) else ()
            for number, order in enumerate(orders, 1):
                end = GoldenEnd(recipe=order.recipe.name, num_done=number, num_total=len(orders))
                on_event(LaunchEvent(kind="report", job=job.name, detail=end.model_dump_json()))
            default = (
                GoldenResult(device_class="cpu", goldens=(SUMMARY,) * len(asked.orders))
                if isinstance(asked, GoldenJob)
                else PASSED
            )
            answer = self._answers.get(job.name, default)
            if isinstance(asked, GoldenJob) and self._breaks in [order.recipe.name for order in asked.orders]:
                answer = FAILURE
            if isinstance(answer, JobFailure):
                reports = (RankReport.of(1, RAISED),)
                yield JobOutcome(
                    job=job.name, index=index, state="failed", failure=answer, rank_reports=reports
                )
            else:
                yield JobOutcome(job=job.name, index=index, state="done", result=write_result(answer))


@pytest.fixture
def cases() -> list[Case]:
    return load_cases([CASES / "ddp.yaml", CASES / "fsdp2.yaml"])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cases: list[Case]) -> Any:
    """Return a function that runs both cases on such ranks, and returns results by name and the events."""
    options = RunOptions(device="cpu", golden_folder=tmp_path / "golden", cache_folder=tmp_path / "cache")

    def do(answers: Answers, **more: Any) -> tuple[dict[str, CaseResult], list[Event], Ranks]:
        ranks = Ranks(answers, **more)
        monkeypatch.setattr(tasks, "run_jobs", ranks.run)
        events: list[Event] = []
        result = run_cases(cases, options, events.append)
        assert result is not None
        return {case.name: case for case in result.cases}, events, ranks

    return do


def test_one_job_makes_the_goldens_and_each_case_has_one(run: Any) -> None:
    results, events, ranks = run({})
    assert [type(read_job(job.payload)) for job in ranks.jobs] == [GoldenJob, VerifyJob, VerifyJob]
    assert {case.verdict for case in results.values()} == {"pass"}
    assert [event.kind for event in events] == [
        "launch",
        "golden",
        "golden-end",
        "golden-end",
        "case-start",
        "case-end",
        "case-start",
        "case-end",
    ]
    assert len(events[1].recipes) == 2
    assert [(event.case, event.num_done, event.num_total) for event in events[2:4]] == [
        (events[1].recipes[0], 1, 2),
        (events[1].recipes[1], 2, 2),
    ]
    assert "is not recorded" in results["ddp"].notes[0]


@pytest.mark.parametrize("seconds", [0.0, 7.0])
def test_ranks_are_told_how_long_to_explain_and_have_time_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cases: list[Case], seconds: float
) -> None:
    ranks = Ranks({})
    monkeypatch.setattr(tasks, "run_jobs", ranks.run)
    options = RunOptions(
        device="cpu",
        golden_folder=tmp_path / "golden",
        cache_folder=tmp_path / "cache",
        explain_seconds=seconds,
        without=("unmoved",),
    )
    run_cases(cases, options, lambda event: None)
    for job in ranks.jobs[1:]:
        asked = read_job(job.payload)
        assert isinstance(asked, VerifyJob)
        assert (asked.explain_seconds, job.grace) == (seconds, 2 * seconds)
        assert asked.without == ("unmoved",)


def test_a_recipe_that_ends_the_ranks_of_all_goldens_fails_alone(run: Any) -> None:
    results, events, ranks = run({}, breaks="stress-sgd")
    assert {name: case.verdict for name, case in results.items()} == {"ddp": "error", "fsdp2": "pass"}
    assert results["ddp"].reason == "the goldens could not be made: rank 1 raised ValueError: no"
    assert [job.name for job in ranks.jobs] == ["goldens", "goldens", "ddp", "goldens", "fsdp2"]
    assert [event.case for event in events if event.kind == "case-end"] == ["ddp", "fsdp2"]


def test_without_goldens_every_case_is_an_error_with_the_reports_in_words(run: Any) -> None:
    results, _, _ = run({"goldens": FAILURE})
    for case in results.values():
        assert case.verdict == "error"
        assert case.reason == "the goldens could not be made: rank 1 raised ValueError: no"
        assert case.rank_reports[0].summary == "ValueError: no"


def test_what_the_user_can_mend_is_the_reason_of_its_case_alone(run: Any) -> None:
    results, _, _ = run({"ddp": Refusal(error="there is no module `x`")})
    assert (results["ddp"].verdict, results["ddp"].reason) == ("error", "there is no module `x`")
    assert results["fsdp2"].verdict == "pass"


def test_a_verdict_that_was_known_before_the_ranks_were_lost_stands(run: Any) -> None:
    results, events, _ = run({"ddp": FAILURE, "fsdp2": FAILURE}, early={"ddp": DIFFERS})
    assert [event.note[:13] for event in events if event.kind == "work"] == ["ddp differs: "]
    case = results["ddp"]
    assert (case.verdict, len(case.findings)) == ("mismatch", 1)
    failed = case.findings[0].observations[0]
    assert isinstance(failed, DiagnosisFailed)
    assert failed.message == "rank 1 raised ValueError: no"
    assert any("rank 1 raised ValueError: no" in note for note in word_case(case).notes)
    assert "2 loss tensors of 3 are inconclusive: tolerance above 50 %" in case.notes
    assert (results["fsdp2"].verdict, results["fsdp2"].reason) == (
        "error",
        "rank 1 raised ValueError: no",
    )


@pytest.fixture
def pairs(cases: list[Case]) -> list[LayoutPair]:
    return [LayoutPair(saver, loader) for saver in cases for loader in cases]


def test_each_save_comes_once_before_the_loads_that_need_it(pairs: list[LayoutPair]) -> None:
    planned = plan_tasks(pairs, RunOptions(), {}, Path("/at"))
    assert [task.case.name for task in planned] == [
        "save ddp",
        "ddp -> ddp",
        "ddp -> fsdp2",
        "save fsdp2",
        "fsdp2 -> ddp",
        "fsdp2 -> fsdp2",
    ]
    assert [task.needs for task in planned] == ["", "save ddp", "save ddp", "", "save fsdp2", "save fsdp2"]
    made = [task.make(case=task.case, golden=Path("/g")) for task in planned]
    assert [type(job) for job in made] == [SaveJob, LoadJob, LoadJob] * 2
    places = {job.checkpoint for job in made if isinstance(job, SaveJob | LoadJob)}
    assert places == {Path("/at/0000"), Path("/at/0001")}


def test_a_pair_with_a_fault_has_a_save_of_its_own(pairs: list[LayoutPair]) -> None:
    planned = plan_tasks(pairs[:2], RunOptions(fault="all:of"), {"ddp -> ddp": "some:fault"}, Path("/at"))
    assert [(task.case.name, task.fault) for task in planned] == [
        ("save ddp -> ddp", "some:fault"),
        ("ddp -> ddp", "some:fault"),
        ("save ddp", "all:of"),
        ("ddp -> fsdp2", "all:of"),
    ]


def test_a_load_without_its_save_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pairs: list[LayoutPair]
) -> None:
    missing = JobFailure(
        cause=FailureCause.RANK,
        rank=0,
        end=RankEnd(how=EndKind.RAISED, error="FileNotFoundError: checkpoint"),
    )
    ranks = Ranks({"save ddp": FAILURE, "ddp -> ddp": missing, "fsdp2 -> ddp": missing})
    monkeypatch.setattr(tasks, "run_jobs", ranks.run)
    options = RunOptions(device="cpu", golden_folder=tmp_path / "golden", cache_folder=tmp_path / "cache")
    result = run_pairs(pairs, options, lambda event: None)
    assert result is not None
    reasons = {case.name: (case.verdict, case.reason) for case in result.cases}
    assert reasons["save ddp"] == ("error", "rank 1 raised ValueError: no")
    assert reasons["ddp -> ddp"] == ("error", "nothing to load: `save ddp` failed")
    assert reasons["fsdp2 -> ddp"] == ("error", "rank 0 raised FileNotFoundError: checkpoint")
    assert reasons["fsdp2 -> fsdp2"] == ("pass", "")
    assert "save fsdp2" not in reasons, "a save that went well is no result"
    assert {(case.saved_by, case.loaded_by) for case in result.cases if case.saved_by} == {
        (saver, loader) for saver in ("ddp", "fsdp2") for loader in ("ddp", "fsdp2")
    }


def test_what_cannot_save_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small, wide = load_cases([CASES / "ddp.yaml", CASES / "hsdp.yaml"])
    ranks = Ranks({})
    monkeypatch.setattr(tasks, "run_jobs", ranks.run)
    options = RunOptions(
        device="cpu", num_ranks=2, golden_folder=tmp_path / "golden", cache_folder=tmp_path / "cache"
    )
    pairs = [LayoutPair(saver, loader) for saver in (small, wide) for loader in (small, wide)]
    result = run_pairs(pairs, options, lambda event: None)
    assert result is not None
    reasons = {case.name: case.reason for case in result.cases if case.verdict == "skipped"}
    needs = "needs 4 ranks; --ranks 2"
    assert reasons == {
        "ddp -> hsdp": needs,
        "hsdp -> ddp": f"hsdp cannot save here: {needs}",
        "hsdp -> hsdp": needs,
    }
