"""Rules for joining the experts' weight gradients of several micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.cases.rule import blame, experts, is_asked, reading
from moeverify.cases.schema import Case
from moeverify.errors import Problem

_PATH = "layout.joined_micro_batches"


@reading(
    _PATH,
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
        yield blame(_PATH, "only experts of the reference model have gradients to join", "remove it")
        return
    if layout.micro_batches % joined:
        message = f"micro_batches {layout.micro_batches} is not divisible by joined_micro_batches {joined}"
        yield blame(_PATH, message, f"set micro_batches to a multiple of {joined}")
    if layout.experts != "grouped_mm":
        yield blame(_PATH, "only `grouped_mm` joins gradients", "write `experts: grouped_mm`")
    if layout.ep > 1 and layout.dispatch != "padded":
        message = "joined micro-batches must have equally many rows"
        yield blame(_PATH, message, "write `dispatch: padded`")
    for name in ("pp", "recompute"):
        if is_asked(layout, name):
            yield blame(
                _PATH, f"joined micro-batches together with {name} are not supported", f"remove {name}"
            )


JOINED_RULES = (rows_of_equal_number,)
