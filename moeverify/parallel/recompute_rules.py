"""Rules of recomputation; `moeverify.parallel.recompute` implements it."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.cases.axes.schedules import PIPELINE_SCHEDULE
from moeverify.cases.rule import blame, reading
from moeverify.cases.schema import Case
from moeverify.errors import Problem

_PATH = "layout.recompute"


@reading(_PATH, "layout.pp", "layout.pipeline_schedule")
def outputs_used_once(case: Case) -> Iterator[Problem]:
    """Outputs kept by `selective` serve one backward pass; some pipeline schedules split it into two."""
    layout = case.layout
    if layout.recompute != "selective" or layout.pp == 1:
        return
    if PIPELINE_SCHEDULE.rows[layout.pipeline_schedule].splits_backward:
        message = f"selective recomputation does not go with {layout.pipeline_schedule}, which splits backward passes"
        yield blame(_PATH, message, "write `recompute: true`, or `pipeline_schedule: interleaved_1f1b`")


RECOMPUTE_RULES = (outputs_used_once,)
