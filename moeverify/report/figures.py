"""Named numbers of a run or a measurement, for tracking over commits."""

from __future__ import annotations

import math
import re

from moeverify.report.numbers import excess
from moeverify.report.sorting import find_worst_check
from moeverify.results.measurement import BenchRun
from moeverify.results.record import Record
from moeverify.results.run import RunResult

_ODD = re.compile(r"[^\w.-]+")


class TrackedCommit(Record):
    """The checked-out commit.

    `number` counts the commits up to it and is the step of a curve. `time` is its commit time in seconds.
    """

    name: str
    number: int
    time: float


class Figures(Record):
    """Numbers keyed by `group/case`, with the tags of their run."""

    numbers: dict[str, float]
    tags: dict[str, str]
    verdict: str = ""


def list_run_figures(run: RunResult) -> Figures:
    """Return for each case error / bound, whether it passed, and its seconds; and totals of the run.

    A non-finite error / bound is left out; `passed` shows the failure.
    """
    numbers: dict[str, float] = {}
    ran = [case for case in run.cases if case.verdict != "skipped"]
    for case in ran:
        name = make_name(case.name)
        numbers[f"passed/{name}"] = float(case.verdict == "pass")
        numbers[f"seconds/{name}"] = case.seconds
        check = find_worst_check(case)
        if check is not None and check.worst is not None:
            share = excess(check.worst.error, check.worst.bound)
            if math.isfinite(share):
                numbers[f"error_over_bound/{name}"] = share
    shares = [value for name, value in numbers.items() if name.startswith("error_over_bound/")]
    numbers["run/passed"] = float(sum(case.verdict == "pass" for case in ran))
    numbers["run/failed"] = float(sum(case.has_failed for case in ran))
    numbers["run/seconds"] = run.seconds
    if shares:
        numbers["run/error_over_bound"] = max(shares)
    return Figures(numbers=numbers, tags=run.environment, verdict=run.verdict)


def list_bench_figures(run: BenchRun) -> Figures:
    """Return for each case the seconds per step, tokens and operations per second, and bytes of memory."""
    numbers: dict[str, float] = {}
    for case in run.cases:
        name = make_name(case.name)
        found = {
            "step_seconds": None if case.step is None else case.step.median,
            "tokens_per_second": case.tokens_per_second,
            "operations_per_second": case.flops,
            "peak_memory": case.peak_memory,
        }
        numbers |= {f"{group}/{name}": value for group, value in found.items() if value is not None}
    return Figures(numbers=numbers, tags=run.environment)


def make_name(case: str) -> str:
    """Return the name of a case with unsupported characters replaced by `_`."""
    return _ODD.sub("_", case) or "_"
