"""Rules for the precision `mixed`, and for modules that are excluded from it."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.cases.rule import blame, reading
from moeverify.cases.schema import Case
from moeverify.errors import Problem
from moeverify.parallel.data_parallel import DATA_PARALLEL


@reading(
    *(f"layout.{name}" for name in ("data_parallel", "dp_replicate", "dp_shard", "cp", "pp", "parallelize")),
    "recipe.precision",
)
def mixed_precision(case: Case) -> Iterator[Problem]:
    """Require FSDP2 or a user's function for `mixed`, and no pipeline parallelism.

    Only these can use one dtype for the arithmetic and another for the parameters.
    """
    layout, path = case.layout, "recipe.precision"
    if case.recipe.precision != "mixed":
        return
    if layout.parallelize is None and not DATA_PARALLEL.find(layout.data_parallel).takes_mixed_precision:
        message = f"mixed is a precision of fsdp2, and {layout.data_parallel} is another data parallelism"
        yield blame(path, message, "write `data_parallel: fsdp2`, or the precision float32 or bfloat16")
    elif layout.parallelize is None and layout.data_ranks * layout.cp == 1:
        message = "mixed is a precision of fsdp2, which needs more than one rank"
        yield blame(path, message, "set layout.dp_shard, or write the precision float32 or bfloat16")
    if layout.pp > 1:
        yield blame(path, "mixed together with pp is not supported", "write float32 or bfloat16")


@reading("layout.in_float32", "layout.parallelize", "recipe.precision")
def wide_modules(case: Case) -> Iterator[Problem]:
    """Require a user's function and the precision `mixed` for `layout.in_float32`."""
    path = "layout.in_float32"
    if not case.layout.in_float32:
        return
    if case.recipe.precision != "mixed":
        yield blame(path, f"in_float32 has no effect on the precision {case.recipe.precision}", "remove it")
    elif case.layout.parallelize is None:
        message = "no module of a built-in layout is left in float32"
        yield blame(path, message, "remove it, or divide the model by `parallelize`")


PRECISION_RULES = (mixed_precision, wide_modules)
