"""All rules across fields, tried on a case."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moeverify.axes.rules import AXIS_RULES
from moeverify.case.choice import report_missing
from moeverify.case.rule import Rule
from moeverify.case.schema import Case
from moeverify.errors import Problem
from moeverify.validation.checks import CHECK_RULES
from moeverify.validation.choices import CHOICE_RULES, CHOICES, list_chosen
from moeverify.validation.precision import PRECISION_RULES
from moeverify.validation.recipe import RECIPE_RULES
from moeverify.validation.sizes import SIZE_RULES

RULES = (*SIZE_RULES, *RECIPE_RULES, *AXIS_RULES, *CHOICE_RULES, *PRECISION_RULES, *CHECK_RULES)


def validate(case: Case, *, is_broken: Callable[[str], bool] = lambda path: False) -> list[Problem]:
    """Return how `case` breaks the rules across fields; each problem has a dotted path, and no file or line.

    A rule is left out where `is_broken` says of a field that it reads that this field could not be read, and where
    the field chooses what nobody has implemented.
    """
    missing = {
        choice.path: problem
        for choice in CHOICES
        if not is_broken(choice.path) and (problem := report_missing(case, choice)) is not None
    }

    def is_unknown(path: str) -> bool:
        return path in missing or is_broken(path)

    tried = (rule for rule in _list_rules(case, is_unknown) if not any(map(is_unknown, rule.reads)))
    return [*missing.values(), *(problem for rule in tried for problem in rule.find(case))]


def _list_rules(case: Case, is_unknown: Callable[[str], bool]) -> Iterator[Rule]:
    """Yield the rules that hold for every case, and those of what this one chooses."""
    yield from RULES
    for choice, chosen in list_chosen(case):
        if not is_unknown(choice.path):
            yield from chosen.rules
