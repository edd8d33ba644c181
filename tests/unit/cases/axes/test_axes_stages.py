"""Layers of stages and stages of ranks, for every schedule."""

from __future__ import annotations

import pytest

from moeverify.cases.axes.stages import count_stages, end_ranks, split_evenly, split_layers, stages_of
from moeverify.cases.schema import Layout


def test_layers_are_cut_evenly_or_as_stated() -> None:
    assert split_layers(Layout(pp=2), 4) == [range(2), range(2, 4)]
    assert split_layers(Layout(pp=2, stage_layers=(3, 1)), 4) == [range(3), range(3, 4)]
    sizes = [len(part) for part in split_layers(Layout(pp=4, stage_layers=(0, 2, 1, 0)), 3)]
    assert sizes == [0, 2, 1, 0]


@pytest.mark.parametrize(
    ("schedule", "virtual", "expected"),
    [
        ("1f1b", None, [[0], [1], [2]]),
        ("gpipe", None, [[0], [1], [2]]),
        ("interleaved_1f1b", None, [[0, 3], [1, 4], [2, 5]]),
        ("interleaved_zero_bubble", 3, [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
        ("zbv", None, [[0, 5], [1, 4], [2, 3]]),
    ],
)
def test_stages_of_each_rank(schedule: str, virtual: int | None, expected: list[list[int]]) -> None:
    layout = Layout(pp=3, pipeline_schedule=schedule, virtual_stages=virtual)  # type: ignore[arg-type]
    assert [stages_of(layout, rank) for rank in range(3)] == expected
    first, last = end_ranks(layout)
    assert 0 in expected[first]
    assert count_stages(layout) - 1 in expected[last]


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (3, 2, [2, 1]),
        (6, 4, [1, 2, 2, 1]),
        (3, 4, [0, 1, 1, 1]),
        (2, 4, [0, 1, 1, 0]),
        (8, 4, [2, 2, 2, 2]),
    ],
)
def test_the_split_that_an_error_proposes(layers: int, stages: int, expected: list[int]) -> None:
    assert split_evenly(layers, stages) == expected
