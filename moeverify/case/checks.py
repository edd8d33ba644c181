"""The rule that the checks which a case names are checks that there are."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.case.rule import blame, reading
from moeverify.case.schema import Case
from moeverify.case.suggest import suggest
from moeverify.errors import Problem
from moeverify.results.checks import CheckName


@reading("checks.skip", "checks.differs", "checks.also")
def known_checks(case: Case) -> Iterator[Problem]:
    """A check that is skipped, declared to differ, or asked for, is one; and only optional ones are asked for."""
    for field in ("skip", "differs", "also"):
        for name in getattr(case.checks, field):
            if name not in set(CheckName):
                yield blame(f"checks.{field}", f"there is no check `{name}`", suggest(name, CheckName))
    for name in set(CheckName).intersection(case.checks.also):
        if not CheckName(name).is_optional:
            yield blame("checks.also", f"`{name}` is checked in any case", "remove it")
