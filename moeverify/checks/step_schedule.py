"""By which other schedule the learning rates of all steps were made, of rules with one change.

Rates are options in float64, so a rule must give each to nine digits. A rule says something only where more steps are
off than it has free choices: of two rates that are off, one number that is chosen leaves one to confirm it.
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
"""More rules that give the same rates say nothing."""

_FAR, _FAST = 3, 8
"""Steps by which a schedule may be off, and how many it may take in one."""

_SHAPES: Mapping[ScheduleName, Callable[[float], float]] = {
    "quarter-cosine": lambda part: math.cos(0.5 * math.pi * part),
    "quarter-sine": lambda part: 1.0 - math.sin(0.5 * math.pi * part),
    "whole-cosine": lambda part: 0.5 * (1.0 + math.cos(2.0 * math.pi * part)),
    "root": lambda part: math.sqrt(1.0 - part),
    "one-minus-root": lambda part: 1.0 - math.sqrt(part),
    "square": lambda part: (1.0 - part) ** 2,
    "one-minus-square": lambda part: 1.0 - part * part,
}
"""Decays that are no recipe's, by the part of the decay that is over."""

_ENDLESS: Mapping[ScheduleName, Callable[[int], float]] = {
    "inverse-root": lambda past: (1.0 + past) ** -0.5,
    "inverse": lambda past: 1.0 / (1.0 + past),
}
"""Decays that have no end, by the steps after the warmup."""


class Rates(NamedTuple):
    """The rates that were `seen` in steps, and the `right` ones (S), of a recipe of `num_steps`."""

    seen: Mapping[int, float]
    right: Sequence[float]
    spec: Optimizer
    counts: Mapping[ScheduleCount, int]
    """Of the layout, by which a rate may be multiplied."""

    @property
    def num_steps(self) -> int:
        return len(self.right)


class _Rule(NamedTuple):
    """A rule with how many choices were made from the rates themselves, or among many."""

    form: ScheduleForm
    rate: Callable[[int], float]
    choices: int = 1


def name_schedule(rates: Rates) -> tuple[ScheduleForm, ...]:
    """Return the rules by which all rates that were seen are made, none where too many are or too little was seen."""
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
    """Return the findings, those of another rate with the rule that gives the rates of all steps, where one does.

    Of groups of parameters with rates of their own none is known.
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
    """Yield the schedule some steps late or early, and at another pace."""
    # Of a constant rate, what is later than the warmup is all of it; what has not begun to move tells nothing.
    least = -min(_FAR, max(rates.seen, default=0) - 1)
    most = min(_FAR, rates.spec.warmup_steps - 1) if rates.spec.schedule == "constant" else _FAR
    for shift in (each for each in range(least, most + 1) if each):
        yield _Rule(_form("shifted", shift), partial(_shift, rates, shift))
    for pace in range(2, _FAST + 1):
        yield _Rule(_form("faster", pace), partial(_take, rates, pace, 1))
        if pace <= max(rates.seen, default=0):  # else it has not moved yet
            yield _Rule(_form("slower", pace), partial(_take, rates, 1, pace))


def _shift(rates: Rates, shift: int, step: int) -> float:
    # Before the first step a warmup has no rate yet, and what has none begins with its first.
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
    """Return the rate with the recipe's warmup, and a decay over the steps that are left of a length."""
    warmup = rates.spec.warmup_steps
    if step < warmup:
        return rates.right[step]
    return rates.spec.lr * shape(min(1.0, (step - warmup) / max(length - warmup, 1)))


def _fall(rates: Rates, fall: Callable[[int], float], step: int) -> float:
    """Return the rate with the recipe's warmup, and a decay that has no end, by the steps after it."""
    warmup = rates.spec.warmup_steps
    return rates.right[step] if step < warmup else rates.spec.lr * fall(step - warmup)


def _list_lengths(rates: Rates) -> Iterator[_Rule]:
    """Yield the same decay over another number of steps, and from the first step on."""
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
    """Return the rate of a decay that begins with the first step, and is multiplied by the warmup."""
    risen = min(1.0, (step + 1) / (rates.spec.warmup_steps + 1))
    return rates.spec.lr * risen * shape(step / rates.num_steps)


def _list_warmups(rates: Rates) -> Iterator[_Rule]:
    """Yield warmups that count from another step, or divide by another number; (step + start) / over."""
    warmup = rates.spec.warmup_steps
    if not warmup:
        return
    without = rates._replace(spec=rates.spec.model_copy(update={"warmup_steps": 0}))
    yield _Rule(_form("no-warmup"), partial(_shift, without, 0))
    for start in (0, 1, 2):
        for over in range(max(warmup - 1, 1), warmup + 3):
            changes = (start != 1) + (over != warmup + 1)
            is_late = start == 0 and over == warmup + 1 and rates.spec.schedule == "constant"
            if changes and start < over and not is_late:  # which is the whole schedule a step late
                form = ScheduleForm(way="warmup", number=float(start), over=over)
                yield _Rule(form, partial(_rise, rates, start, over), changes)


def _rise(rates: Rates, start: int, over: int, step: int) -> float:
    part = (step + start) / over
    if part < 1.0:
        return rates.spec.lr * part
    return rates.spec.lr if step <= rates.spec.warmup_steps else rates.right[step]


def _list_fitted(rates: Rates) -> Iterator[_Rule]:
    """Yield decays with one number that the rates tell: what is left at the end, or what each step keeps."""
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
    """Yield the right rates times a count of the layout, its root, or one over these."""
    for name, count in rates.counts.items():
        for power in (1.0, -1.0, 0.5, -0.5):
            if count > 1:
                yield _Rule(_form("scaled", power, name), partial(_scale, rates, count**power))


def _scale(rates: Rates, times: float, step: int) -> float:
    return times * rates.right[step]


def _form(way: ScheduleWay, number: float = 0.0, name: ScheduleName = "") -> ScheduleForm:
    return ScheduleForm(way=way, number=float(number), name=name)
