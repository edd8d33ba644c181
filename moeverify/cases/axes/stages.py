"""The layers of each pipeline stage and the stages of each pp rank, by plain arithmetic."""

from __future__ import annotations

from moeverify.cases.axes.schedules import PIPELINE_SCHEDULE
from moeverify.cases.schema import Layout


def count_stages(layout: Layout) -> int:
    """Return the number of pipeline stages: pp times `virtual_stages`.

    The schedule defines the default of `virtual_stages`.
    """
    default = 1 if layout.pp == 1 else PIPELINE_SCHEDULE.find(layout.pipeline_schedule).stages_per_rank
    return layout.pp * (layout.virtual_stages or default)


def split_layers(layout: Layout, num_layers: int) -> list[range]:
    """Return the layers of each stage, in order: as in `stage_layers`, or equally many for all.

    The first and the last stage may have no layers, because they have the embedding or the head.
    """
    num_stages = count_stages(layout)
    sizes = layout.stage_layers or (num_layers // num_stages,) * num_stages
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def split_evenly(num_layers: int, num_stages: int) -> list[int]:
    """Return stage sizes that are as even as possible; stages at the ends get fewer layers."""
    if num_layers < num_stages:
        inner = [1] * num_layers
        return [0, *inner] if len(inner) + 1 == num_stages else [0, *inner, 0]
    size, rest = divmod(num_layers, num_stages)
    middle = (num_stages - rest) // 2
    return [size + (middle <= stage < middle + rest) for stage in range(num_stages)]


def stages_of(layout: Layout, pp_rank: int) -> list[int]:
    """Return the stages of a rank of the pp axis, in order.

    Stage s is on rank s mod pp. In a V schedule the stages go down the ranks and up again, so the first
    rank has the first and the last stage (Qi et al., arXiv 2401.10241, section 6).
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
