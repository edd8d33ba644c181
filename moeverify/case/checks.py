"""The names of all checks, which a case may skip or declare to differ, and the rule that it names no others."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.case.rule import blame, reading
from moeverify.case.schema import Case
from moeverify.case.suggest import suggest
from moeverify.errors import Problem

# What `moeverify.results.checks` has, which this floor cannot see; a test holds the two together.
CHECK_NAMES = (
    "initial state",
    "routing",
    "routing flips",
    "routing weights",
    "loss",
    "gradient",
    "gradient norm",
    "update",
    "optimizer state",
    "buffers",
    "loaded",
    "replicas",
    "coverage",
    "sharding",
    "repeat",
    "trace",
    "precision",
    "experts",
    "resumed",
)


@reading("checks.skip", "checks.differs")
def known_checks(case: Case) -> Iterator[Problem]:
    """A check that is skipped, or declared to differ, is one."""
    for field in ("skip", "differs"):
        for name in getattr(case.checks, field):
            if name not in CHECK_NAMES:
                yield blame(f"checks.{field}", f"there is no check `{name}`", suggest(name, CHECK_NAMES))
