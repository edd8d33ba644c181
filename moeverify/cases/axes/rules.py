"""The rules of all axes: sizes that degrees must divide, supported models, and rules of single axes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from moeverify.cases.axes.axis import Axis, Size
from moeverify.cases.axes.registry import AXES, DEGREES
from moeverify.cases.rule import MODEL_OF_LAYOUT, Rule, blame, experts, own_model, reading, round_up
from moeverify.cases.schema import Case
from moeverify.errors import Problem

_ROWS = tuple(axis for axis in DEGREES if axis.batch_dim == "rows")
_NOT_WRAPPED = tuple(axis for axis in DEGREES if axis.custom_models != "wrapped")


@reading(*(f"layout.{axis.degree}" for axis in _ROWS), "layout.micro_batches", "recipe.data.batch")
def whole_rows(case: Case) -> Iterator[Problem]:
    """Every rank gets the same number of rows in every micro-batch."""
    rows, layout = case.recipe.data.batch, case.layout
    parts = {name: getattr(layout, name) for name in (*(axis.degree for axis in _ROWS), "micro_batches")}
    divisor = math.prod(parts.values())
    if rows % divisor:
        product = " x ".join(f"{name} {value}" for name, value in parts.items() if value > 1)
        path = next(f"layout.{name}" for name, value in parts.items() if value > 1)
        remedy = f"set recipe.data.batch to a multiple of {divisor}, such as {round_up(rows, divisor)}"
        yield blame(path, f"recipe.data.batch {rows} is not divisible by {product}", remedy)


def _divides(axis: Axis, size: Size) -> Rule:
    """Return the rule that an axis divides a size of the model, if the model has it."""
    section, _, name = size.path.rpartition(".")
    unless = (f"layout.{size.unless}",) if size.unless else ()

    @reading(
        f"layout.{axis.degree}", "layout.tp", "layout.ep", f"recipe.{size.path}", *MODEL_OF_LAYOUT, *unless
    )
    def rule(case: Case) -> Iterator[Problem]:
        if size.unless and getattr(case.layout, size.unless) is not None:
            return
        model = own_model(case)
        if model is None or (section == "model.moe" and experts(case) is None):
            return
        if name == "ffn_hidden" and model.num_dense_layers == 0 and model.moe is not None:
            return
        value, divisor = (
            getattr(experts(case) if section == "model.moe" else model, name),
            axis.size(case.layout),
        )
        # The default of etp is tp, so blame the field that the user wrote.
        written = "tp" if getattr(case.layout, axis.degree) is None else axis.degree
        if value % divisor:
            message = f"recipe.{size.path} {value} ({size.meaning}) is not divisible by {written} {divisor}"
            multiple = round_up(value, divisor)
            remedy = f"set it to a multiple of {divisor}, such as {multiple}, or change {written}"
            yield blame(f"layout.{written}", message, remedy)

    return rule


@reading(*(f"layout.{axis.degree}" for axis in _NOT_WRAPPED), "layout.parallelize", "recipe.model")
def custom_models(case: Case) -> Iterator[Problem]:
    """A model that moeverify did not write can only be replicated or sharded by parameter."""
    if case.recipe.model.reference is not None or case.layout.parallelize is not None:
        return
    for axis in _NOT_WRAPPED:
        degree = getattr(case.layout, axis.degree) or 1
        if degree == 1:
            continue
        subject = f"{axis.name} {degree} of a model with a `factory`"
        if axis.custom_models == "no":
            yield blame(f"layout.{axis.degree}", f"{subject} is not supported", f"remove {axis.name}")
        else:
            remedy = 'write `parallelize: "package.module:function"`, or remove it'
            yield blame(f"layout.{axis.degree}", f"{subject} needs your own function", remedy)


AXIS_RULES: tuple[Rule, ...] = (
    whole_rows,
    *(_divides(axis, size) for axis in AXES for size in axis.sizes),
    *(rule for axis in AXES for rule in axis.rules),
    custom_models,
)
