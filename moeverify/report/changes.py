"""Differences between two runs: cases, verdicts, coverage, margins of each check, times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text

from moeverify.report.console import print_lines
from moeverify.report.numbers import excess, format_bound, format_count, format_number, format_seconds
from moeverify.report.sanitize import clean
from moeverify.results.finding import CheckResult
from moeverify.results.run import CaseResult, RunResult

# Errors below this share of their bound are treated as equal: 1e-16 against 0 is not a change.
_FLOOR = 1e-4
_SECONDS_FACTOR = 1.5
_MIN_SECONDS = 1.0

Kind = Literal["verdict", "case", "check", "coverage", "recipe", "error", "bound", "seconds", "environment"]


@dataclass(frozen=True)
class Change:
    """One difference between two runs: its subject, and the state before and after, in words."""

    kind: Kind
    subject: str
    before: str
    after: str


def compare_runs(before: RunResult, after: RunResult, *, factor: float = 10.0) -> list[Change]:
    """Return all changes between two runs, verdicts first.

    An error or bound is reported if it changed by more than `factor`. Errors are compared as a share of
    their bound. A change of recipe or precision, which moves bounds too, therefore does not look like a
    change of error.
    """
    olds = {case.name: case for case in before.cases}
    news = {case.name: case for case in after.cases}
    changes = [
        Change("verdict", name, old.verdict, news[name].verdict)
        for name, old in olds.items()
        if name in news and old.verdict != news[name].verdict
    ]
    changes += [
        Change("case", name, case.verdict, "not there") for name, case in olds.items() if name not in news
    ]
    changes += [
        Change("case", name, "not there", case.verdict) for name, case in news.items() if name not in olds
    ]
    for name, old in olds.items():
        if name in news:
            changes += _compare_cases(old, news[name], factor)
    changes += _compare_environments(before.environment, after.environment)
    return changes


def same_verdicts(changes: list[Change]) -> bool:
    """Return whether both runs have the same cases with the same verdicts."""
    return not any(change.kind in ("verdict", "case") for change in changes)


def _compare_cases(old: CaseResult, new: CaseResult, factor: float) -> Iterator[Change]:
    """Yield the changes within one case."""
    for label in ("recipe", "layout"):
        if getattr(old, label) != getattr(new, label):
            yield Change("recipe", f"{old.name} {label}", getattr(old, label), getattr(new, label))
    if old.ranks != new.ranks:
        yield Change("recipe", f"{old.name} ranks", str(old.ranks), str(new.ranks))
    if "skipped" in (old.verdict, new.verdict):
        return
    old_checks = {check.name: check for check in old.checks}
    new_checks = {check.name: check for check in new.checks}
    for name in sorted(old_checks.keys() | new_checks.keys()):
        subject = f"{old.name} {name}"
        if name not in new_checks:
            yield Change("check", subject, old_checks[name].verdict, "not made")
        elif name not in old_checks:
            yield Change("check", subject, "not made", new_checks[name].verdict)
        else:
            yield from _compare_checks(subject, old_checks[name], new_checks[name], factor)
    slower, faster = max(old.seconds, new.seconds), min(old.seconds, new.seconds)
    if slower - faster > _MIN_SECONDS and slower > _SECONDS_FACTOR * faster:
        yield Change("seconds", old.name, format_seconds(old.seconds), format_seconds(new.seconds))


def _compare_checks(subject: str, old: CheckResult, new: CheckResult, factor: float) -> Iterator[Change]:
    """Yield the changes in one check: verdict, number of tensors, share of the bound, the bound itself."""
    if old.verdict != new.verdict:
        yield Change("check", subject, old.verdict, new.verdict)
    if old.tensors != new.tensors:
        yield Change("coverage", subject, f"{old.tensors} tensors", f"{new.tensors} tensors")
    if old.worst is None or new.worst is None:
        return
    shares = [max(excess(worst.error, worst.bound), _FLOOR) for worst in (old.worst, new.worst)]
    if _differ(shares[0], shares[1], factor):
        states = [f"{format_number(w.error)} / {format_bound(w.bound)}" for w in (old.worst, new.worst)]
        if old.worst.tensor != new.worst.tensor:
            states[0] += f" ({old.worst.tensor})"
        yield Change("error", subject, states[0], f"{states[1]} ({new.worst.tensor})")
    if _differ(old.worst.bound, new.worst.bound, factor):
        yield Change("bound", subject, format_bound(old.worst.bound), format_bound(new.worst.bound))


def _differ(old: float, new: float, factor: float) -> bool:
    """Return whether the larger is more than `factor` times the smaller."""
    return old != new and max(old, new) > factor * min(old, new)


def _compare_environments(old: dict[str, str], new: dict[str, str]) -> Iterator[Change]:
    """Yield the entries in which the two environments differ."""
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield Change("environment", key, old.get(key, "not known"), new.get(key, "not known"))


_TITLES: dict[Kind, str] = {
    "verdict": "verdicts",
    "case": "cases that only one run has",
    "check": "checks",
    "coverage": "tensors compared",
    "bound": "bounds",
    "error": "worst error / bound",
    "recipe": "recipes and layouts",
    "seconds": "times",
    "environment": "environment",
}


def render_changes(changes: list[Change], before: RunResult, after: RunResult, console: Console) -> None:
    """Print the changes by kind, most important first, and whether the verdicts are the same."""
    for kind, title in _TITLES.items():
        members = [change for change in changes if change.kind == kind]
        if not members:
            continue
        print_lines(console, Text(title, style="bold"))
        width = min(max(len(change.subject) for change in members), 40)
        for change in members:
            values = f"{change.before or 'empty'} -> {change.after or 'empty'}"
            print_lines(console, Text(clean(f"  {change.subject:<{width}}  {values}")))
        console.print()
    same = same_verdicts(changes)
    head = ("same verdicts", "green") if same else ("verdicts differ", "bold red")
    sizes = f"{len(before.cases)} -> {format_count(len(after.cases), 'case')}"
    times = f"{format_seconds(before.seconds)} -> {format_seconds(after.seconds)}"
    print_lines(console, Text.assemble(head, f"; {format_count(len(changes), 'change')}; {sizes}; {times}"))
