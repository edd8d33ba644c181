"""The pipeline schedules of torch: stages per rank, their order, and their requirements.

Sources: GPipe (arXiv 1811.06965), 1F1B and interleaved 1F1B (arXiv 2104.04473, section 2.2), zero bubble
and its V schedule (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moeverify.cases.choice import Row, Table
from moeverify.cases.rule import blame, reading, round_up
from moeverify.cases.schema import Case
from moeverify.errors import Problem

SCHEDULE_FIELDS = ("layout.pp", "layout.pipeline_schedule", "layout.virtual_stages")


@dataclass(frozen=True, kw_only=True)
class Schedule(Row):
    """A schedule: its class in `torch.distributed.pipelining.schedules`, and properties of its stages.

    `stages_per_rank` is the default of `virtual_stages`. With `is_v` the stages go down the ranks and up
    again. `takes_list` is False for a class with one stage per rank, which takes the stage itself instead
    of a list. With `splits_backward`, gradients of weights have a backward pass of their own.
    """

    torch_class: str
    stages_per_rank: int = 1
    takes_list: bool = False
    is_v: bool = False
    splits_backward: bool = False


@reading(*SCHEDULE_FIELDS)
def single_stage(case: Case) -> Iterator[Problem]:
    """These schedules have one stage per rank."""
    name, virtual = case.layout.pipeline_schedule, case.layout.virtual_stages
    if case.layout.pp > 1 and virtual is not None and virtual > 1:
        message = f"{name} has one stage a rank, so virtual_stages cannot be {virtual}"
        remedy = "remove it, or write `pipeline_schedule: interleaved_1f1b`"
        yield blame("layout.virtual_stages", message, remedy)


@reading(*SCHEDULE_FIELDS)
def several_stages(case: Case) -> Iterator[Problem]:
    """These schedules interleave the stages of a rank."""
    if case.layout.pp > 1 and case.layout.virtual_stages == 1:
        message = f"{case.layout.pipeline_schedule} has several stages a rank, so virtual_stages cannot be 1"
        yield blame("layout.virtual_stages", message, "write 2, or `pipeline_schedule: 1f1b`")


@reading(*SCHEDULE_FIELDS)
def two_stages(case: Case) -> Iterator[Problem]:
    """A V schedule passes each rank twice."""
    virtual = case.layout.virtual_stages
    if case.layout.pp > 1 and virtual is not None and virtual != 2:
        message = f"zbv has two stages a rank, so virtual_stages cannot be {virtual}"
        yield blame("layout.virtual_stages", message, "write 2")


@reading(*SCHEDULE_FIELDS, "layout.micro_batches")
def filled_pipeline(case: Case) -> Iterator[Problem]:
    """1F1B begins with a forward pass on every stage."""
    layout = case.layout
    if layout.pp > 1 and layout.micro_batches < layout.pp:
        num, pp = layout.micro_batches, layout.pp
        message = f"1f1b needs at least as many micro_batches as stages: {num} for pp {pp}"
        remedy = f"set it to {pp} or more, or write `pipeline_schedule: gpipe`"
        yield blame("layout.micro_batches", message, remedy)


@reading(*SCHEDULE_FIELDS, "layout.micro_batches")
def whole_rounds(case: Case) -> Iterator[Problem]:
    """Interleaved schedules process the micro-batches in rounds of equal size."""
    layout = case.layout
    num, rounds = layout.micro_batches, max(1, layout.micro_batches // layout.pp)
    if layout.pp > 1 and num % rounds:
        message = f"{layout.pipeline_schedule} takes {rounds} rounds, which do not divide micro_batches {num}"
        remedy = f"set it to a multiple of pp, such as {round_up(num, layout.pp)}"
        yield blame("layout.micro_batches", message, remedy)


PIPELINE_SCHEDULE: Table[Schedule] = Table(
    path="layout.pipeline_schedule",
    home="moeverify.cases.axes.schedules",
    rows={
        "gpipe": Schedule(
            meaning="GPipe: all forward passes, then all backward passes.",
            torch_class="ScheduleGPipe",
            rules=(single_stage,),
        ),
        "1f1b": Schedule(
            meaning="One forward, one backward: each backward pass as early as it can be.",
            torch_class="Schedule1F1B",
            rules=(single_stage, filled_pipeline),
        ),
        "interleaved_1f1b": Schedule(
            meaning="1f1b over several stages a rank.",
            torch_class="ScheduleInterleaved1F1B",
            stages_per_rank=2,
            takes_list=True,
            rules=(several_stages, whole_rounds),
        ),
        "interleaved_zero_bubble": Schedule(
            meaning="Interleaved, with gradients of weights computed later than those of inputs.",
            torch_class="ScheduleInterleavedZeroBubble",
            stages_per_rank=2,
            takes_list=True,
            splits_backward=True,
            rules=(several_stages, whole_rounds),
        ),
        "zbv": Schedule(
            meaning="Zero bubble over a V: the first rank has the first and the last stage.",
            torch_class="ScheduleZBVZeroBubble",
            stages_per_rank=2,
            takes_list=True,
            is_v=True,
            splits_backward=True,
            rules=(two_stages,),
        ),
    },
)
