"""Alternative schedules, each with one change, that explain the learning rates of all steps.

Rates are float64 options, so a rule must match each to nine digits. A rule counts only if more steps are
wrong than it has free choices. With two wrong rates and one fitted number, one rate remains to confirm it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from moeverify.case.schema import Optimizer
from moeverify.checks.recomputed_step import Row
from moeverify.checks.step_findings import with_facts
from moeverify.results.finding import Finding
from moeverify.results.step_facts import (
    RecomputedFacts,
    ScheduleCount,
    ScheduleForm,
    ScheduleName,
    ScheduleWay,
)
from moeverify.train.decay import RATE_SCHEDULE
from moeverify.train.schedule import find_factor

_SAME = 1e-9
_MOST_ALIKE = 3
"""If more rules give the same rates, none is reported."""

_FAR, _FAST = 3, 8
"""Largest shift of a schedule in steps, and its largest pace."""

_SHAPES: Mapping[ScheduleName, Callable[[float], float]] = {
    "quarter-cosine": lambda part: math.cos(0.5 * math.pi * part),
    "quarter-sine": lambda part: 1.0 - math.sin(0.5 * math.pi * part),
    "whole-cosine": lambda part: 0.5 * (1.0 + math.cos(2.0 * math.pi * part)),
    "root": lambda part: math.sqrt(1.0 - part),
    "one-minus-root": lambda part: 1.0 - math.sqrt(part),
    "square": lambda part: (1.0 - part) ** 2,
    "one-minus-square": lambda part: 1.0 - part * part,
}
"""Decays that no recipe has, as functions of the elapsed part of the decay."""

_ENDLESS: Mapping[ScheduleName, Callable[[int], float]] = {
    "inverse-root": lambda past: (1.0 + past) ** -0.5,
    "inverse": lambda past: 1.0 / (1.0 + past),
}
"""Decays without an end, as functions of the number of steps after the warmup."""


class Rates(NamedTuple):
    """The rates `seen` by step, and the `right` ones (S) of a recipe with `num_steps` steps."""

    seen: Mapping[int, float]
    right: Sequence[float]
    spec: Optimizer
    counts: Mapping[ScheduleCount, int]
    """Counts of the layout that may multiply a rate."""

    @property
    def num_steps(self) -> int:
        return len(self.right)


class _Rule(NamedTuple):
    """A rule, with the number of free choices: fitted to the rates, or selected among many."""

    form: ScheduleForm
    rate: Callable[[int], float]
    choices: int = 1


def name_schedule(rates: Rates) -> tuple[ScheduleForm, ...]:
    """Return the rules that match all observed rates; none if too many match or too few rates are wrong."""
    off = [step for step, rate in rates.seen.items() if not _is_same(rate, rates.right[step])]
    found: list[ScheduleForm] = []
    for rule in _list_rules(rates):
        if len(off) > rule.choices and all(
            _is_same(rule.rate(step), rate) for step, rate in rates.seen.items()
        ):
            found.append(rule.form)
    return tuple(found) if len(found) <= _MOST_ALIKE else ()


def add_schedule(
    findings: Sequence[Finding],
    rows: Sequence[Row],
    right: Sequence[float],
    spec: Optimizer,
    counts: Mapping[ScheduleCount, int],
) -> list[Finding]:
    """Return the findings, with the rule that gives the rates of all steps in those about a wrong rate.

    Without effect if parameter groups have different rates.
    """
    by_step: dict[int, set[float]] = {}
    for row in rows:
        if row.rate is not None and row.key[0] < len(right):
            by_step.setdefault(row.key[0], set()).add(row.rate)
    seen = {step: found.pop() for step, found in sorted(by_step.items()) if len(found) == 1}
    if len(seen) < len(by_step):
        return list(findings)
    forms = name_schedule(Rates(seen, right, spec, counts))
    if not forms:
        return list(findings)
    return [
        with_facts(finding, rates=tuple(seen.values()), schedule=forms)
        if isinstance(finding.facts, RecomputedFacts) and finding.facts.is_of_rate
        else finding
        for finding in findings
    ]


def _is_same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_SAME, abs_tol=1e-300)


def _list_rules(rates: Rates) -> Iterator[_Rule]:
    yield from _list_shifts(rates)
    yield from _list_shapes(rates)
    yield from _list_lengths(rates)
    yield from _list_warmups(rates)
    yield from _list_fitted(rates)
    yield from _list_scales(rates)


def _list_shifts(rates: Rates) -> Iterator[_Rule]:
    """Yield the schedule shifted by some steps, or at another pace."""
    # A constant rate is constant after the warmup, so larger shifts are alike. A schedule that has not
    # started to move determines nothing.
    least = -min(_FAR, max(rates.seen, default=0) - 1)
    most = min(_FAR, rates.spec.warmup_steps - 1) if rates.spec.schedule == "constant" else _FAR
    for shift in (each for each in range(least, most + 1) if each):
        yield _Rule(_form("shifted", shift), partial(_shift, rates, shift))
    for pace in range(2, _FAST + 1):
        yield _Rule(_form("faster", pace), partial(_take, rates, pace, 1))
        if pace <= max(rates.seen, default=0):  # else it has not moved yet
            yield _Rule(_form("slower", pace), partial(_take, rates, 1, pace))


def _shift(rates: Rates, shift: int, step: int) -> float:
    # Before step 0 a warmup has rate 0, and a schedule without warmup has its first rate.
    if step + shift < 0:
        return 0.0 if rates.spec.warmup_steps else rates.spec.lr
    return rates.spec.lr * find_factor(rates.spec, rates.num_steps, step + shift)


def _take(rates: Rates, times: int, over: int, step: int) -> float:
    return _shift(rates, 0, step * times // over)


def _list_shapes(rates: Rates) -> Iterator[_Rule]:
    """Yield other decays after the same warmup."""
    of_recipes: Sequence[ScheduleName] = ("constant", "linear", "cosine")
    known = {name: RATE_SCHEDULE.find(name).factor for name in of_recipes}
    for name, shape in {**known, **_SHAPES}.items():
        if name != rates.spec.schedule:
            yield _Rule(_form("shape", 0.0, name), partial(_decay, rates, shape, rates.num_steps))
    for name, fall in _ENDLESS.items():
        yield _Rule(_form("shape", 0.0, name), partial(_fall, rates, fall))


def _decay(rates: Rates, shape: Callable[[float], float], length: int, step: int) -> float:
    """Return the rate of the recipe's warmup, then a decay up to step `length`."""
    warmup = rates.spec.warmup_steps
    if step < warmup:
        return rates.right[step]
    return rates.spec.lr * shape(min(1.0, (step - warmup) / max(length - warmup, 1)))


def _fall(rates: Rates, fall: Callable[[int], float], step: int) -> float:
    """Return the rate of the recipe's warmup, then a decay without an end."""
    warmup = rates.spec.warmup_steps
    return rates.right[step] if step < warmup else rates.spec.lr * fall(step - warmup)


def _list_lengths(rates: Rates) -> Iterator[_Rule]:
    """Yield the same decay over another number of steps, or from the first step on."""
    if rates.spec.schedule == "constant":
        return
    shape, steps = RATE_SCHEDULE.find(rates.spec.schedule).factor, rates.num_steps
    warmup = rates.spec.warmup_steps
    lengths = {steps - 1, steps + 1, 2 * steps, steps // 2, steps + warmup, steps - warmup} - {steps}
    for length in sorted(each for each in lengths if each > warmup):
        yield _Rule(_form("length", length), partial(_decay, rates, shape, length))
    if warmup:
        yield _Rule(_form("decay-from-start"), partial(_decay_at_once, rates, shape))


def _decay_at_once(rates: Rates, shape: Callable[[float], float], step: int) -> float:
    """Return the rate of a decay that starts at the first step and is multiplied by the warmup."""
    risen = min(1.0, (step + 1) / (rates.spec.warmup_steps + 1))
    return rates.spec.lr * risen * shape(step / rates.num_steps)


def _list_warmups(rates: Rates) -> Iterator[_Rule]:
    """Yield warmups with another start or divisor: (step + start) / over."""
    warmup = rates.spec.warmup_steps
    if not warmup:
        return
    without = rates._replace(spec=rates.spec.model_copy(update={"warmup_steps": 0}))
    yield _Rule(_form("no-warmup"), partial(_shift, without, 0))
    for start in (0, 1, 2):
        for over in range(max(warmup - 1, 1), warmup + 3):
            changes = (start != 1) + (over != warmup + 1)
            is_late = start == 0 and over == warmup + 1 and rates.spec.schedule == "constant"
            if changes and start < over and not is_late:  # equals the whole schedule one step late
                form = ScheduleForm(way="warmup", number=float(start), over=over)
                yield _Rule(form, partial(_rise, rates, start, over), changes)


def _rise(rates: Rates, start: int, over: int, step: int) -> float:
    part = (step + start) / over
    if part < 1.0:
        return rates.spec.lr * part
    return rates.spec.lr if step <= rates.spec.warmup_steps else rates.right[step]


def _list_fitted(rates: Rates) -> Iterator[_Rule]:
    """Yield decays with one fitted number: the final fraction, or the factor per step."""
    spec, warmup = rates.spec, rates.spec.warmup_steps
    first = min((step for step in rates.seen if step > warmup), default=None)
    if first is None:
        return
    seen, right = rates.seen[first] / spec.lr, rates.right[first] / spec.lr
    kept = seen ** (1.0 / (first - warmup)) if seen > 0.0 else 0.0
    if 0.0 < kept < 1.0:
        yield _Rule(_form("geometric", kept), partial(_fall, rates, partial(pow, kept)))
    if right < 1.0 and 0.0 < (floor := (seen - right) / (1.0 - right)) < 1.0:
        shape = RATE_SCHEDULE.find(spec.schedule).factor
        lifted = partial(_lift, shape, floor)
        yield _Rule(_form("floor", floor), partial(_decay, rates, lifted, rates.num_steps))


def _lift(shape: Callable[[float], float], floor: float, part: float) -> float:
    return floor + (1.0 - floor) * shape(part)


def _list_scales(rates: Rates) -> Iterator[_Rule]:
    """Yield the right rates times a count of the layout, its root, or the inverses."""
    for name, count in rates.counts.items():
        for power in (1.0, -1.0, 0.5, -0.5):
            if count > 1:
                yield _Rule(_form("scaled", power, name), partial(_scale, rates, count**power))


def _scale(rates: Rates, times: float, step: int) -> float:
    return times * rates.right[step]


def _form(way: ScheduleWay, number: float = 0.0, name: ScheduleName = "") -> ScheduleForm:
    return ScheduleForm(way=way, number=float(number), name=name)
