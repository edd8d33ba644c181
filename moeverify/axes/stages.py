"""Which pipeline stage has which layers, and which rank of the pp axis has which stages, by plain arithmetic."""

from __future__ import annotations

from moeverify.axes.schedules import PIPELINE_SCHEDULE
from moeverify.case.schema import Layout


def count_stages(layout: Layout) -> int:
    """Return into how many stages the layers are divided: `virtual_stages` for each rank of pp.

    Left out, it is what the schedule takes.
    """
    default = 1 if layout.pp == 1 else PIPELINE_SCHEDULE.find(layout.pipeline_schedule).stages_per_rank
    return layout.pp * (layout.virtual_stages or default)


def split_layers(layout: Layout, num_layers: int) -> list[range]:
    """Return the layers of each stage, in order: those of `stage_layers`, or else equally many for all.

    The first and the last stage may have none: they still have the embedding, or the head.
    """
    num_stages = count_stages(layout)
    sizes = layout.stage_layers or (num_layers // num_stages,) * num_stages
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def split_evenly(num_layers: int, num_stages: int) -> list[int]:
    """Return sizes of stages as even as they can be; what is missing is missing at the ends."""
    if num_layers < num_stages:
        inner = [1] * num_layers
        return [0, *inner] if len(inner) + 1 == num_stages else [0, *inner, 0]
    size, rest = divmod(num_layers, num_stages)
    middle = (num_stages - rest) // 2
    return [size + (middle <= stage < middle + rest) for stage in range(num_stages)]


def stages_of(layout: Layout, pp_rank: int) -> list[int]:
    """Return the stages that a rank of the pp axis has, in order.

    They go round in a loop, stage s to rank s mod pp; under a V they go down and up again, so that the first rank
    has the first and the last stage (Qi et al., arXiv 2401.10241, section 6).
    """
    rounds = range(count_stages(layout) // layout.pp)
    is_v = _is_v(layout)
    return [
        number * layout.pp + (layout.pp - 1 - pp_rank if is_v and number % 2 else pp_rank)
        for number in rounds
    ]


def end_ranks(layout: Layout) -> tuple[int, int]:
    """Return the ranks of the pp axis that have the first and the last stage."""
    return 0, 0 if _is_v(layout) else layout.pp - 1


def _is_v(layout: Layout) -> bool:
    return PIPELINE_SCHEDULE.find(layout.pipeline_schedule).is_v
