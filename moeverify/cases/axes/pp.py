"""The axis of pipeline parallelism: its ranks hold different layers and process the same rows."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.cases.axes.axis import Axis, Divided
from moeverify.cases.axes.schedules import SCHEDULE_FIELDS
from moeverify.cases.axes.stages import count_stages, split_evenly
from moeverify.cases.rule import blame, own_model, reading, round_up
from moeverify.cases.schema import Case, Layout
from moeverify.errors import Problem
from moeverify.results.checks import Kind


@reading(*SCHEDULE_FIELDS, "layout.stage_layers", "layout.parallelize")
def pipelines(case: Case) -> Iterator[Problem]:
    """The fields of a pipeline need pp above 1, and a user's own function has no mesh of stages."""
    layout = case.layout
    if layout.pp == 1:
        for name in ("pipeline_schedule", "virtual_stages", "stage_layers"):
            if getattr(layout, name) != Layout.model_fields[name].default:
                yield blame(f"layout.{name}", f"{name} needs pp above 1", f"set pp, or remove {name}")
        return
    if layout.parallelize is not None:
        yield blame("layout.pp", "pp together with `parallelize` is not supported", "remove pp")


@reading(*SCHEDULE_FIELDS, "layout.stage_layers", "recipe.model.num_layers", "layout.parallelize")
def layers_of_stages(case: Case) -> Iterator[Problem]:
    """Every layer is in one stage, and only the first and last stage may be empty."""
    layout, model = case.layout, own_model(case)
    if layout.pp == 1 or model is None:
        return
    num, layers, sizes = count_stages(layout), model.num_layers, layout.stage_layers
    example = f"write `stage_layers: {split_evenly(layers, num)}`"
    virtual = num // layout.pp
    stages = f"pp {layout.pp}" if virtual == 1 else f"{num} stages (pp {layout.pp} x {virtual})"
    if num > layers + 2:
        message = f"recipe.model.num_layers {layers} is too few for {stages}"
        lower = "pp" if num == layout.pp else "pp or virtual_stages"
        yield blame("layout.pp", message, f"set it to at least {num - 2}, or lower {lower}")
    elif sizes is None:
        if layers % num:
            message = f"recipe.model.num_layers {layers} is not divisible by {stages}"
            remedy = f"set it to a multiple of {num}, such as {round_up(layers, num)}, or {example}"
            yield blame("layout.pp", message, remedy)
    elif len(sizes) != num:
        yield blame("layout.stage_layers", f"{len(sizes)} stages are given for {stages}", example)
    elif sum(sizes) != layers:
        message = f"the stages have {sum(sizes)} layers together, the model {layers}"
        yield blame("layout.stage_layers", message, example)
    elif 0 in sizes[1:-1]:
        message = f"stage {sizes.index(0, 1)} has no layer, which only the first and the last may"
        yield blame("layout.stage_layers", message, example)


AXIS = Axis(
    name="pp",
    degree="pp",
    size=lambda layout: layout.pp,
    views=lambda _: ("data", "dense", "sparse", "loss"),
    divides=Divided(Kind.INITIAL_WEIGHT, modules=("layers.*",), once=True),
    custom_models="no",
    rules=(pipelines, layers_of_stages),
)
