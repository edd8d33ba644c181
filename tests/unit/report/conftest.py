"""Handmade results, and their output at a given width."""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from moeverify.results.failure import EndKind, RankEnd
from moeverify.results.finding import CheckResult, Finding, Worst
from moeverify.results.run import CaseResult, RankReport, RunResult

MakeCase = Callable[..., CaseResult]
MakeFinding = Callable[..., Finding]
MakeRun = Callable[..., RunResult]
Print = Callable[..., str]


def build_check(name: str, tensors: int, tensor: str, error: float, bound: float) -> CheckResult:
    verdict = "pass" if error <= bound else "mismatch"
    worst = Worst(tensor=tensor, error=error, bound=bound)
    return CheckResult.model_validate({"name": name, "verdict": verdict, "tensors": tensors, "worst": worst})


GOOD = (
    build_check("loss", 2, "loss", 1.1e-16, 1e-10),
    build_check("gradient", 212, "blocks.1.moe.experts.12.up.weight", 3.1e-15, 1e-10),
    build_check("replica", 64, "blocks.1.moe.router.weight", 0.0, 0.0),
)
BAD = (
    build_check("loss", 2, "loss", 1.1e-16, 1e-10),
    build_check("gradient", 212, "blocks.1.moe.experts.12.up.weight", 3.0, 1e-10),
    build_check("gradient_norm", 2, "gradient_norm", math.nan, 1e-10),
)


@pytest.fixture
def screenshots(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script that makes the screenshots of the docs."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("screenshots")


@pytest.fixture
def browser(screenshots: ModuleType) -> ModuleType:
    """Return the script, which can open pages; without a browser, the test is skipped."""
    if screenshots.find_browser() is None:
        pytest.skip(f"needs a browser: one of {', '.join(screenshots.BROWSERS)}")
    return screenshots


@pytest.fixture
def make_case() -> MakeCase:
    def do(name: str = "fsdp2-ep-4", verdict: str = "pass", **fields: Any) -> CaseResult:
        content = {
            "file": f"cases/{name}.yaml",
            "ranks": 4,
            "seconds": 3.25,
            "recipe": "stress-adamw",
            "layout": "fsdp2 4 + ep 2",
            "checks": {"pass": GOOD, "mismatch": BAD}.get(verdict, ()),
        }
        return CaseResult.model_validate({"name": name, "verdict": verdict, **content, **fields})

    return do


@pytest.fixture
def make_finding() -> MakeFinding:
    def do(**fields: Any) -> Finding:
        content = {
            "check": "gradient",
            "tensor": "blocks.1.moe.experts.12.up.weight",
            "step": 0,
            "rank": 3,
            "ranks": (0, 1, 2, 3),
            "coordinates": {"dp_shard": 1, "ep": 3},
            "error": 3.0,
            "bound": 1e-10,
            "scale": 4.0,
            "cosine": 1.0,
            "index": (3, 12, 7),
            "expected": 1.25,
            "actual": 5.0,
            "cause": "everything is 4 = ep times too large",
            "where": "backward of blocks.1.moe.combine",
            "evidence": ("fit residual 2.1e-16",),
        }
        return Finding.model_validate({**content, **fields})

    return do


def build_reports() -> tuple[RankReport, ...]:
    frames = [f'  File "train.py", line {number}, in f\n    call(x[{number}])' for number in range(20)]
    stack = "\n".join([*frames, "RuntimeError: boom at 0x7f00"])
    hung = [
        RankReport(
            rank=rank,
            state="hung",
            end=RankEnd(how=EndKind.OVER_TIME, timeout=120.0),
            summary="no answer for 120 s",
            stack=f"wait in <Group object at 0x7f{rank}0>",
            last_collective="all_reduce #12 over tp" if rank < 3 else "barrier #14",
        )
        for rank in (1, 2, 3)
    ]
    return (*hung, RankReport(rank=0, state="raised", summary="RuntimeError: boom", stack=stack))


@pytest.fixture
def make_run(make_case: MakeCase, make_finding: MakeFinding) -> MakeRun:
    """Return a function that makes a run with every kind of case, or with the given ones."""

    def do(*cases: CaseResult, **fields: Any) -> RunResult:
        every = cases or (
            make_case("ddp-2", notes=("an idle expert has no gradient",)),
            make_case("fsdp2-4", notes=("an idle expert has no gradient",)),
            make_case("fsdp2-ep-4", "mismatch", findings=(make_finding(),)),
            make_case("tp-2-sequence", "error", reason="rank 0 raised E", rank_reports=build_reports()),
            make_case("fsdp-tp-ep-8", "skipped", reason="needs 8 ranks"),
            make_case("hsdp-8", "skipped", reason="needs 8 ranks"),
        )
        content = {
            "verdict": "error",
            "environment": {"torch": "2.13.0", "backend": "gloo"},
            "command": "moeverify run cases --set recipe.seed=3 --json x.json",
            "started": "2025-11-21T09:00:00+00:00",
            "seconds": 141.3,
            "launches": 2,
        }
        return RunResult.model_validate({**content, **fields, "cases": every})

    return do


@pytest.fixture
def print_at() -> Print:
    """Return a function that calls `render(console)` and returns its output."""

    def do(render: Callable[[Console], None], *, width: int = 80, terminal: bool = True) -> str:
        file = io.StringIO()
        render(
            Console(
                file=file,
                width=width,
                force_terminal=terminal,
                no_color=True,
                markup=False,
                highlight=False,
                emoji=False,
                legacy_windows=False,
            )
        )
        return file.getvalue()

    return do
