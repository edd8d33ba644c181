"""Words for learning rates and schedules."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.report.numbers import format_number
from moeverify.results.step_facts import RecomputedFacts, ScheduleForm, ScheduleName

_SHAPES: Mapping[ScheduleName, str] = {
    "constant": "stays constant after the warmup",
    "linear": "falls along a line",
    "cosine": "falls along half a cosine",
    "quarter-cosine": "falls along a quarter of a cosine, cos(pi/2 * part)",
    "quarter-sine": "falls along a quarter of a sine, 1 - sin(pi/2 * part)",
    "whole-cosine": "falls and rises along a whole cosine, (1 + cos(2 * pi * part))/2",
    "root": "falls as the root of what is left of the decay",
    "one-minus-root": "falls as 1 less the root of the part of the decay that is over",
    "square": "falls as the square of what is left of the decay",
    "one-minus-square": "falls as 1 less the square of the part of the decay that is over",
    "inverse-root": "falls as one over the root of the steps",
    "inverse": "falls as one over the steps",
}

_POWERS = {
    1.0: "multiplied by {}",
    -1.0: "divided by {}",
    0.5: "multiplied by the root of {}",
    -0.5: "divided by the root of {}",
}


def describe_schedule(facts: RecomputedFacts) -> str:
    """Return the schedules that explain the observed rates, and these rates."""
    first, *rest = map(describe_form, facts.schedule)
    said = f"either {first}, or {', or '.join(rest)}: the rates are equal here" if rest else first
    return f"the learning rate {said}; of the steps seen it is {', '.join(map(format_number, facts.rates))}"


def describe_form(form: ScheduleForm) -> str:
    """Return a rule for the learning rate in words."""
    number, count = format_number(form.number), int(abs(form.number))
    steps = "1 step" if count == 1 else f"{count} steps"
    whole = {
        "shifted": f"is that of {steps} {'earlier' if form.number < 0.0 else 'later'} in each step",
        "faster": f"moves on by {steps} of the schedule in each step",
        "slower": f"moves on by a step of the schedule only every {steps}",
        "shape": _SHAPES.get(form.name, ""),
        "length": f"decays as over {steps}, not over the recipe's",
        "decay-from-start": "decays from the first step on, not from the end of the warmup",
        "no-warmup": "has no warmup",
        "warmup": f"warms up as (step + {count})/{form.over}",
        "geometric": f"is multiplied by {number} in each step after the warmup",
        "floor": f"decays to {number} of the largest rate, not to 0",
        "scaled": f"is {_POWERS.get(form.number, '').format(f'the number of {form.name}')} in all steps",
    }
    return whole[form.way]
