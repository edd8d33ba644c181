"""Metrics of runs by commit, and the services that store them; an uninstalled service is skipped."""

from __future__ import annotations

import math
import sqlite3
import subprocess
from pathlib import Path

import pytest

from moeverify.cli.track import find_commit
from moeverify.errors import MachineError
from moeverify.report import trackers
from moeverify.report.figures import Figures, TrackedCommit, list_bench_figures, list_run_figures
from moeverify.report.trackers import Tracker, check_tracker, log_figures
from moeverify.results.finding import CheckResult, Worst
from moeverify.results.measurement import BenchRun, Measurement, Spread
from moeverify.results.run import CaseResult, RunResult

COMMIT = TrackedCommit(name="0123456789abcdef", number=7, time=1_700_000_000.0)
FIGURES = Figures(
    numbers={"run/passed": 2.0, "error_over_bound/a": 0.25}, tags={"torch": "2.13"}, verdict="pass"
)


def _make_case(name: str, verdict: str, error: float) -> CaseResult:
    worst = Worst(tensor="w", step=0, error=error, bound=1e-10)
    check = CheckResult(name="gradient", verdict="pass", tensors=1, worst=worst)
    return CaseResult.model_validate(
        {"name": name, "file": "", "verdict": verdict, "ranks": 2, "seconds": 3.0, "checks": (check,)}
    )


def test_figures_of_a_run() -> None:
    cases = (
        _make_case("a", "pass", 2.5e-11),
        _make_case("odd <name>/b", "mismatch", 1e-9),
        _make_case("lost", "error", math.inf),
        _make_case("skipped", "skipped", 0.0),
    )
    run = RunResult(verdict="error", environment={"torch": "2.13"}, seconds=9.0, cases=cases)
    found = list_run_figures(run)
    assert found.numbers["error_over_bound/a"] == pytest.approx(0.25)
    assert found.numbers["error_over_bound/odd_name_b"] == pytest.approx(10.0)
    assert "error_over_bound/lost" not in found.numbers
    assert {name: found.numbers[f"passed/{name}"] for name in ("a", "odd_name_b", "lost")} == {
        "a": 1.0,
        "odd_name_b": 0.0,
        "lost": 0.0,
    }
    assert not any("skipped" in name for name in found.numbers)
    sums = {name: value for name, value in found.numbers.items() if name.startswith("run/")}
    assert sums == {
        "run/passed": 1.0,
        "run/failed": 2.0,
        "run/seconds": 9.0,
        "run/error_over_bound": pytest.approx(10.0),
    }
    assert found.verdict == "error"


def test_figures_of_a_measurement() -> None:
    step = Spread(median=0.5, least=0.4, most=0.6)
    base = {"file": "", "layout": "", "recipe": ""}
    cases = (
        Measurement.model_validate(
            {**base, "name": "a", "ranks": 2, "step": step, "tokens_per_second": 64.0}
        ),
        Measurement.model_validate({**base, "name": "b", "ranks": 2, "reason": "needs 8 ranks"}),
    )
    run = BenchRun(environment={}, started="", seconds=1.0, warmup=1, steps=3, cases=cases)
    assert list_bench_figures(run).numbers == {"step_seconds/a": 0.5, "tokens_per_second/a": 64.0}


def test_a_commit_is_numbered_by_those_before_it(tmp_path: Path) -> None:
    assert find_commit(tmp_path).name == ""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    for message in ("one", "two"):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", message], cwd=tmp_path, check=True)
    found = find_commit(tmp_path)
    assert (found.number, len(found.name)) == (2, 40)


def test_a_service_that_is_not_installed_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match=r"moeverify\[wandb\]"):
        check_tracker(Tracker.wandb)


@pytest.mark.slow
def test_tensorboard_has_the_curve(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_figures(Tracker.tensorboard, FIGURES, COMMIT, tmp_path)
    log_figures(Tracker.tensorboard, FIGURES, COMMIT.model_copy(update={"number": 8}), tmp_path)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (tag,) = [tag for tag in events.Tags()["tensors"] if tag == "run/passed"]
    assert [event.step for event in events.Tensors(tag)] == [7, 8]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_metrics_parameters_and_the_commit(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    log_figures(Tracker.mlflow, FIGURES, COMMIT, tmp_path / "odd folder")
    with sqlite3.connect(tmp_path / "odd folder" / "mlflow.db") as base:
        rows = base.execute("select key, value, step from metrics order by key").fetchall()
        tags = dict(base.execute("select key, value from tags").fetchall())
    assert rows == [("error_over_bound/a", 0.25, 7), ("run/passed", 2.0, 7)]
    assert (tags["commit"], tags["verdict"]) == (COMMIT.name, "pass")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_writes_a_run_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    log_figures(Tracker.wandb, FIGURES, COMMIT, tmp_path)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert b"error_over_bound/a" in file.read_bytes()
