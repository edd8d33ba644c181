"""When FSDP2 frees gathered parameters: a trade-off of memory against all-gathers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moeverify.cases.choice import Row, Table
from moeverify.cases.rule import blame, reading
from moeverify.cases.schema import Case
from moeverify.errors import Problem


@reading(*(f"layout.{name}" for name in ("reshard", "data_parallel", "pp", "parallelize")), "recipe.model")
def blocks_of_fsdp2(case: Case) -> Iterator[Problem]:
    """Only FSDP2 on the reference model has this choice; a pipeline stage keeps parameters gathered."""
    layout, path = case.layout, "layout.reshard"
    if layout.parallelize is not None or case.recipe.model.reference is None:
        yield blame(path, "`reshard` is for the built-in FSDP2 of the reference model", "remove it")
    elif layout.data_parallel != "fsdp2":
        yield blame(path, f"{layout.data_parallel} has no `reshard`", "write `data_parallel: fsdp2`")
    elif layout.pp > 1:
        message = "a stage of a pipeline keeps its gathered parameters between micro-batches anyway"
        yield blame(path, message, "remove it, or remove pp")


@dataclass(frozen=True, kw_only=True)
class Reshard(Row):
    """Whether gathered parameters are freed after forward, and after the backward of each micro-batch.

    They are always freed after the last backward pass of a step, because the optimizer changes the shards.
    """

    after_forward: bool
    after_backward: bool


RESHARD: Table[Reshard] = Table(
    path="layout.reshard",
    home=__name__,
    rows={
        "forward": Reshard(
            meaning="After each forward pass: a block is gathered twice for each micro-batch.",
            after_forward=True,
            after_backward=True,
        ),
        "backward": Reshard(
            meaning="After each backward pass: a block is gathered once for each micro-batch.",
            rules=(blocks_of_fsdp2,),
            after_forward=False,
            after_backward=True,
        ),
        "step": Reshard(
            meaning="After the last backward pass of a step: a block is gathered once for all micro-batches.",
            rules=(blocks_of_fsdp2,),
            after_forward=False,
            after_backward=False,
        ),
    },
)
