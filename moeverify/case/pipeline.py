"""What pipelines take: layers for every stage, micro-batches for the schedule, and what goes together with them."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.case.rule import Rule, blame, reading, reference_model, round_up
from moeverify.case.schema import Case, Layout
from moeverify.errors import Problem

_SCHEDULE = ("layout.pp", "layout.pipeline_schedule", "layout.virtual_stages")


@reading(*_SCHEDULE, "layout.stage_layers", "recipe.model", "layout.parallelize")
def pipelines(case: Case) -> Iterator[Problem]:
    """Only the reference model under moeverify's own layouts is cut into stages."""
    layout = case.layout
    if layout.pp == 1:
        for name, default in (
            ("pipeline_schedule", "1f1b"),
            ("virtual_stages", None),
            ("stage_layers", None),
        ):
            if getattr(layout, name) != default:
                yield blame(f"layout.{name}", f"{name} needs pp above 1", f"set pp, or remove {name}")
        return
    if layout.parallelize is not None:
        yield blame("layout.pp", "pp together with `parallelize` is not supported", "remove pp")
    elif reference_model(case) is None:
        yield blame("layout.pp", f"pp {layout.pp} of a model with a `factory` is not supported", "remove pp")


@reading(*_SCHEDULE, "layout.data_parallel", "layout.dp_replicate", "layout.dp_shard", "layout.cp")
def pipeline_data(case: Case) -> Iterator[Problem]:
    """Schedules run stages by hand, which the wrappers of DDP and FSDP1 do not see."""
    layout = case.layout
    if layout.pp > 1 and layout.data_parallel != "fsdp2" and layout.data_ranks * layout.cp > 1:
        message = f"{layout.data_parallel} together with pp is not supported"
        yield blame("layout.data_parallel", message, "write `data_parallel: fsdp2`")


@reading(*_SCHEDULE)
def stages_of_schedule(case: Case) -> Iterator[Problem]:
    """Each schedule says how many stages a rank has."""
    layout = case.layout
    name, virtual = layout.pipeline_schedule, layout.virtual_stages
    if layout.pp == 1 or virtual is None:
        return
    path = "layout.virtual_stages"
    if name in ("gpipe", "1f1b") and virtual > 1:
        remedy = "remove it, or write `pipeline_schedule: interleaved_1f1b`"
        yield blame(path, f"{name} has one stage a rank, so virtual_stages cannot be {virtual}", remedy)
    elif name == "zbv" and virtual != 2:
        yield blame(path, f"zbv has two stages a rank, so virtual_stages cannot be {virtual}", "write 2")
    elif name.startswith("interleaved") and virtual == 1:
        message = f"{name} has several stages a rank, so virtual_stages cannot be 1"
        yield blame(path, message, "write 2, or `pipeline_schedule: 1f1b`")


@reading(*_SCHEDULE, "layout.stage_layers", "recipe.model.num_layers", "layout.parallelize")
def layers_of_stages(case: Case) -> Iterator[Problem]:
    """Every layer is in one stage, and no stage between the ends is empty."""
    layout, model = case.layout, reference_model(case)
    if layout.pp == 1 or model is None or layout.parallelize is not None:
        return
    num, layers, sizes = layout.num_stages, model.num_layers, layout.stage_layers
    example = f"write `stage_layers: {split_evenly(layers, num)}`"
    if num > layers + 2:
        message = f"recipe.model.num_layers {layers} is too few for {_count(layout)}"
        lower = "pp" if num == layout.pp else "pp or virtual_stages"
        yield blame("layout.pp", message, f"set it to at least {num - 2}, or lower {lower}")
    elif sizes is None:
        if layers % num:
            message = f"recipe.model.num_layers {layers} is not divisible by {_count(layout)}"
            remedy = f"set it to a multiple of {num}, such as {round_up(layers, num)}, or {example}"
            yield blame("layout.pp", message, remedy)
    elif len(sizes) != num:
        yield blame("layout.stage_layers", f"{len(sizes)} stages are given for {_count(layout)}", example)
    elif sum(sizes) != layers:
        message = f"the stages have {sum(sizes)} layers together, the model {layers}"
        yield blame("layout.stage_layers", message, example)
    elif 0 in sizes[1:-1]:
        message = f"stage {sizes.index(0, 1)} has no layer, which only the first and the last may"
        yield blame("layout.stage_layers", message, example)


def split_evenly(num_layers: int, num_stages: int) -> list[int]:
    """Return sizes of stages as even as they can be; what is missing is missing at the ends."""
    if num_layers < num_stages:
        inner = [1] * num_layers
        return [0, *inner] if len(inner) + 1 == num_stages else [0, *inner, 0]
    size, rest = divmod(num_layers, num_stages)
    middle = (num_stages - rest) // 2
    return [size + (middle <= stage < middle + rest) for stage in range(num_stages)]


def _count(layout: Layout) -> str:
    """Return how many stages there are and why."""
    virtual = layout.num_stages // layout.pp
    return f"pp {layout.pp}" if virtual == 1 else f"{layout.num_stages} stages (pp {layout.pp} x {virtual})"


@reading(*_SCHEDULE, "layout.micro_batches")
def micro_batches_of_schedule(case: Case) -> Iterator[Problem]:
    """Schedules need enough micro-batches, or whole rounds of them."""
    layout = case.layout
    if layout.pp == 1:
        return
    name, num, path = layout.pipeline_schedule, layout.micro_batches, "layout.micro_batches"
    if name == "1f1b" and num < layout.pp:
        message = f"1f1b needs at least as many micro_batches as stages: {num} for pp {layout.pp}"
        yield blame(path, message, f"set it to {layout.pp} or more, or write `pipeline_schedule: gpipe`")
    if name.startswith("interleaved"):
        rounds = max(1, num // layout.pp)
        if num % rounds:
            message = f"{name} takes {rounds} rounds, which do not divide micro_batches {num}"
            yield blame(path, message, f"set it to a multiple of pp, such as {round_up(num, layout.pp)}")


PIPELINE_RULES: tuple[Rule, ...] = (
    pipelines,
    pipeline_data,
    stages_of_schedule,
    layers_of_stages,
    micro_batches_of_schedule,
)
