"""Rules of recomputation; `moeverify.parallel.recompute` implements it."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.cases.rule import blame, reading
from moeverify.cases.schema import Case
from moeverify.errors import Problem

_PATH = "layout.recompute"


@reading(_PATH, "layout.pp")
def outputs_used_once(case: Case) -> Iterator[Problem]:
    """Outputs kept by `selective` serve one backward pass, and pipeline schedules may need two."""
    if case.layout.recompute == "selective" and case.layout.pp > 1:
        message = "selective recomputation together with pp is not supported"
        yield blame(_PATH, message, "write `recompute: true`, or remove pp")


RECOMPUTE_RULES = (outputs_used_once,)
