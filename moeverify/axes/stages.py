"""Which pipeline stage has which layers, and which rank of the pp axis has which stages, by plain arithmetic."""

from __future__ import annotations

from moeverify.case.schema import Layout


def split_layers(layout: Layout, num_layers: int) -> list[range]:
    """Return the layers of each stage, in order: those of `stage_layers`, or else equally many for all.

    The first and the last stage may have none: they still have the embedding, or the head.
    """
    sizes = layout.stage_layers or (num_layers // layout.num_stages,) * layout.num_stages
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def stages_of(layout: Layout, pp_rank: int) -> list[int]:
    """Return the stages that a rank of the pp axis has, in order.

    They go round in a loop, stage s to rank s mod pp; under `zbv` they go down and up again in a V, so that the
    first rank has the first and the last stage (Qi et al., arXiv 2401.10241, section 6).
    """
    rounds = range(layout.num_stages // layout.pp)
    is_v = layout.pipeline_schedule == "zbv"
    return [
        number * layout.pp + (layout.pp - 1 - pp_rank if is_v and number % 2 else pp_rank)
        for number in rounds
    ]


def end_ranks(layout: Layout) -> tuple[int, int]:
    """Return the ranks of the pp axis that have the first and the last stage."""
    return 0, 0 if layout.pipeline_schedule == "zbv" else layout.pp - 1
