"""Rules of CUDA graphs, which replace many kernel launches by one.

`moeverify.train.micro_batch_graph` captures and launches graphs. This module decides when they can be used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moeverify.cases.choice import Row, Table
from moeverify.cases.rule import blame, experts, is_asked, reading
from moeverify.cases.schema import Case
from moeverify.errors import Problem
from moeverify.results.checks import CheckName
from moeverify.results.obstacle import Obstacle, UnsupportedHere

_PATH = "layout.graphs"


@reading(
    _PATH,
    *(
        f"layout.{name}"
        for name in ("tp", "cp", "pp", "recompute", "data_parallel", "reshard", "parallelize")
    ),
    "recipe.model",
)
def passes_between_gathers(case: Case) -> Iterator[Problem]:
    """A captured pass computes with weights that stay gathered, and leaves gradients unreduced."""
    layout = case.layout
    if layout.parallelize is not None or case.recipe.model.reference is None:
        yield blame(_PATH, "`graphs` is for the built-in parallelism of the reference model", "remove it")
        return
    for name in ("tp", "cp", "pp", "recompute"):
        if is_asked(layout, name):
            yield blame(_PATH, f"graphs together with {name} are not supported", f"remove {name}")
    if layout.data_parallel != "fsdp2":
        message = f"the passes of {layout.data_parallel} reduce gradients, which a graph leaves out"
        yield blame(_PATH, message, "write `data_parallel: fsdp2`")
    elif layout.reshard != "step":
        message = "a graph needs parameters that stay gathered for all micro-batches of a step"
        yield blame(_PATH, message, "write `reshard: step`")


@reading(
    _PATH,
    *(f"layout.{name}" for name in ("ep", "dispatch", "experts", "parallelize")),
    "recipe.precision",
    "recipe.model",
    "recipe.model.moe",
)
def sizes_on_the_device(case: Case) -> Iterator[Problem]:
    """A graph replays with the sizes of its capture, so no size may come from the device."""
    layout = case.layout
    if case.recipe.precision == "mixed":
        message = "graphs together with the precision mixed are not supported"
        yield blame(_PATH, message, "remove it, or write another recipe.precision")
    if experts(case) is None or layout.parallelize is not None:
        return
    if layout.ep > 1 and layout.dispatch != "padded":
        yield blame(_PATH, "a graph cannot wait for the sizes of an exchange", "write `dispatch: padded`")
    if layout.experts != "grouped_mm" or case.recipe.precision != "bfloat16":
        message = "only `grouped_mm` in bfloat16 leaves the number of rows of each expert on the device"
        yield blame(_PATH, message, "write `experts: grouped_mm`, and recipe.precision bfloat16")


@reading(_PATH, "checks.also")
def unwatched_passes(case: Case) -> Iterator[Problem]:
    """A graph launch does not expose the outputs of a block."""
    for name in (CheckName.ACTIVATIONS, CheckName.FORCED_BLOCKS):
        if name in case.checks.also:
            message = f"nothing inside a graph can be shown, so there is no check `{name}`"
            yield blame(_PATH, message, "remove one of them")


@dataclass(frozen=True, kw_only=True)
class GraphsKind(Row):
    """An option of `layout.graphs`: the part of a step that is one graph; `is_captured`: any at all."""

    is_captured: bool


@dataclass(frozen=True, kw_only=True)
class _MicroBatch(GraphsKind):
    def find_obstacle(self, case: Case, device: str, backend: str) -> Obstacle | None:
        if device != "cuda":
            return UnsupportedHere(why="CUDA graphs need a GPU")
        if backend == "gloo" and case.layout.world_size > 1:
            why = "no CUDA graph can hold the collectives of gloo: each rank needs a GPU of its own"
            return UnsupportedHere(why=why)
        return None


GRAPHS: Table[GraphsKind] = Table(
    path=_PATH,
    home=__name__,
    rows={
        "none": GraphsKind(meaning="Nothing: each kernel is a launch.", is_captured=False),
        "micro_batch": _MicroBatch(
            meaning="The forward and backward pass of a micro-batch, gradients added in place.",
            rules=(passes_between_gathers, sizes_on_the_device, unwatched_passes),
            is_captured=True,
        ),
    },
)
