"""All rules across fields, applied to a case."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moeverify.cases.axes.rules import AXIS_RULES
from moeverify.cases.choice import report_missing
from moeverify.cases.rule import Rule
from moeverify.cases.schema import Case
from moeverify.cases.validation.checks import CHECK_RULES
from moeverify.cases.validation.choices import CHOICE_RULES, CHOICES, list_chosen
from moeverify.cases.validation.precision import PRECISION_RULES
from moeverify.cases.validation.recipe import RECIPE_RULES
from moeverify.cases.validation.sizes import SIZE_RULES
from moeverify.errors import Problem

RULES = (*SIZE_RULES, *RECIPE_RULES, *AXIS_RULES, *CHOICE_RULES, *PRECISION_RULES, *CHECK_RULES)


def validate(case: Case, *, is_broken: Callable[[str], bool] = lambda path: False) -> list[Problem]:
    """Return the problems of `case` with the rules across fields.

    Each problem has a dotted path, without file or line. `is_broken` says whether a field could not be
    read. A rule is skipped if it reads a broken field, or a field that selects an unknown implementation.
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
    """Yield the rules for every case, and the rules of the implementations that this case selects."""
    yield from RULES
    for choice, chosen in list_chosen(case):
        if not is_unknown(choice.path):
            yield from chosen.rules
