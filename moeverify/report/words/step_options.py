"""Words for coefficients of an optimizer step that are products of its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeverify.report.numbers import format_range
from moeverify.results.step_facts import Option, OptionNumber, OptionPower

_OPTIONS: Mapping[Option, str] = {
    "beta1": "beta1",
    "1-beta1": "(1 - beta1)",
    "beta2": "beta2",
    "1-beta2": "(1 - beta2)",
    "momentum": "momentum",
    "1-momentum": "(1 - momentum)",
    "rate": "the learning rate",
    "rate-of-options": "the learning rate of the options",
    "decay": "the weight decay",
}

_POWERS = {0.5: "the root of {}", 2.0: "the square of {}", 1.0: "{}"}


def describe_number(term: str, number: OptionNumber) -> str:
    """Return the wrong coefficient of a term, and the expected one."""
    expected = _describe(number.expected)
    steps = "" if not number.steps else f" in {_describe_steps(number.steps)} alone"
    if not number.found:
        return f"{term} is not multiplied by {expected}{steps}"
    return f"{term} is multiplied by {_describe(number.found)} in place of {expected}{steps}"


def _describe_steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {format_range(steps)}"


def _describe(powers: Sequence[OptionPower]) -> str:
    """Return a product of powers in words: `beta1/(1 - beta1)`."""
    above = [_describe_power(each.option, each.power) for each in powers if each.power > 0.0]
    under = [_describe_power(each.option, -each.power) for each in powers if each.power < 0.0]
    product = " times ".join(above) or "1"
    if not under:
        return product[1:-1] if len(powers) == 1 and product.startswith("(") else product
    bottom = under[0] if len(under) == 1 else f"({' times '.join(under)})"
    return f"{product}/{bottom}"


def _describe_power(option: Option, power: float) -> str:
    return _POWERS[power].format(_OPTIONS[option])
