"""Rules of `joined_micro_batches` and `recompute`. No torch: the modules that implement these options need it."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.cases.axes.schedules import PIPELINE_SCHEDULE
from moeverify.cases.rule import blame, experts, is_asked, reading
from moeverify.cases.schema import Case
from moeverify.errors import Problem

_JOINED = "layout.joined_micro_batches"
_RECOMPUTE = "layout.recompute"


@reading(
    _JOINED,
    *(f"layout.{name}" for name in ("micro_batches", "ep", "dispatch", "experts", "pp", "recompute")),
    "layout.parallelize",
    "recipe.model",
    "recipe.model.moe",
)
def rows_of_equal_number(case: Case) -> Iterator[Problem]:
    """Joined micro-batches have equally many rows and run one after the other."""
    layout = case.layout
    joined = layout.joined_micro_batches
    if joined == 1:
        return
    if layout.parallelize is not None or experts(case) is None:
        yield blame(_JOINED, "only experts of the reference model have gradients to join", "remove it")
        return
    if layout.micro_batches % joined:
        message = f"micro_batches {layout.micro_batches} is not divisible by joined_micro_batches {joined}"
        yield blame(_JOINED, message, f"set micro_batches to a multiple of {joined}")
    if layout.experts != "grouped_mm":
        yield blame(_JOINED, "only `grouped_mm` joins gradients", "write `experts: grouped_mm`")
    if layout.ep > 1 and layout.dispatch != "padded":
        message = "joined micro-batches must have equally many rows"
        yield blame(_JOINED, message, "write `dispatch: padded`")
    for name in ("pp", "recompute"):
        if is_asked(layout, name):
            yield blame(
                _JOINED, f"joined micro-batches together with {name} are not supported", f"remove {name}"
            )


@reading(_RECOMPUTE, "layout.pp", "layout.pipeline_schedule")
def outputs_used_once(case: Case) -> Iterator[Problem]:
    """Outputs kept by `selective` serve one backward pass; some pipeline schedules split it into two."""
    layout = case.layout
    if layout.recompute != "selective" or layout.pp == 1:
        return
    if PIPELINE_SCHEDULE.rows[layout.pipeline_schedule].splits_backward:
        message = f"selective recomputation does not go with {layout.pipeline_schedule}, which splits backward passes"
        yield blame(_RECOMPUTE, message, "write `recompute: true`, or `pipeline_schedule: interleaved_1f1b`")


PARALLEL_RULES = (rows_of_equal_number, outputs_used_once)
