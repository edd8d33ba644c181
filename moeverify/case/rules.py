"""All rules across fields, tried on a case."""

from __future__ import annotations

from collections.abc import Callable

from moeverify.case.checks import known_checks
from moeverify.case.degrees import DEGREE_RULES
from moeverify.case.pipeline import PIPELINE_RULES
from moeverify.case.recipe_rules import RECIPE_RULES
from moeverify.case.schema import Case
from moeverify.case.support import SUPPORT_RULES
from moeverify.errors import Problem

RULES = (*RECIPE_RULES, *DEGREE_RULES, *SUPPORT_RULES, *PIPELINE_RULES, known_checks)


def validate(case: Case, *, is_broken: Callable[[str], bool] = lambda path: False) -> list[Problem]:
    """Return how `case` breaks the rules across fields; each problem has a dotted path, and no file or line.

    A rule is left out where `is_broken` says of a field that it reads that this field could not be read.
    """
    tried = (rule for rule in RULES if not any(is_broken(path) for path in rule.reads))
    return [problem for rule in tried for problem in rule.find(case)]
