"""When the activations of a block can be computed again in parts: how, is in `moeverify.parallel.recompute`."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.case.rule import blame, reading
from moeverify.case.schema import Case
from moeverify.errors import Problem

_PATH = "layout.recompute"


@reading(_PATH, "layout.pp")
def outputs_used_once(case: Case) -> Iterator[Problem]:
    """What `selective` keeps is there for one backward pass of a block, and schedules of pipelines may take two."""
    if case.layout.recompute == "selective" and case.layout.pp > 1:
        message = "selective recomputation together with pp is not supported"
        yield blame(_PATH, message, "write `recompute: true`, or remove pp")


RECOMPUTE_RULES = (outputs_used_once,)
