"""A run, or a measurement, as named numbers that can be followed over commits."""

from __future__ import annotations

import math
import re

from moeverify.report.numbers import excess
from moeverify.report.sorting import find_worst_check
from moeverify.results.measurement import BenchRun
from moeverify.results.record import Record
from moeverify.results.run import RunResult

_ODD = re.compile(r"[^\w.-]+")


class Commit(Record):
    """The commit that was checked out: how many there are up to it, which is the step of a curve. Units: seconds."""

    name: str
    number: int
    time: float


class Figures(Record):
    """Numbers by their names, `group/case`, and what they are of."""

    numbers: dict[str, float]
    tags: dict[str, str]
    verdict: str = ""


def list_run_figures(run: RunResult) -> Figures:
    """Return, by case, the largest error over its bound, whether it passed, and its seconds; and the sums.

    An error over bound that is infinite, or of a rank that was lost, is left out: `passed` says it.
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
    """Return, by case, seconds of a step, tokens a second, operations a second, and bytes of memory."""
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
    """Return the name of a case with what services refuse in the names of numbers as `_`."""
    return _ODD.sub("_", case) or "_"
