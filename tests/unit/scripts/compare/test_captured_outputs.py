"""Modules whose outputs jump within their bounds: jumps that locate a wrong block in 16 bits, and others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moeverify.scripts.compare.outputs import OutputComparer
from moeverify.scripts.record.lines import Header, Output, ShardRegion
from moeverify.scripts.record.read import RankRecord, RecordedRun

UNIT = 2.0**-9
NUM_TOKENS = 100


def make_comparer() -> OutputComparer:
    record = RankRecord(Header(rank=0, world_size=1, first=0, last=0), Path(), None)
    record.outputs = [
        Output(
            step=0,
            forward=0,
            name="block",
            is_input=is_input,
            where=ShardRegion(shape=(1,)),
            dtype="float32",
            offset=0,
            bits=0,
        )
        for is_input in (True, False)
    ]
    run = RecordedRun(Path(), [record])
    return OutputComparer(run, run)


def find(num_wrong: int, size: float, size_of_input: float = 0.0) -> frozenset[str]:
    comparer = make_comparer()
    expected = torch.ones(NUM_TOKENS, 4, dtype=torch.float64)
    moved = expected.clone()
    moved[:num_wrong] += size
    comparer._add_half(0, "block input", expected, expected + size_of_input)
    comparer._add_half(0, "block", expected, moved)
    return comparer.find_jumps(0, UNIT)


@pytest.mark.parametrize(
    ("num_wrong", "size", "size_of_input"),
    [
        (40, 1.0, 0.0),  # a router that chooses other experts
        (100, 4 * UNIT, 0.0),  # rounding
        (100, 0.05, 0.01),  # the input was already off
    ],
)
def test_rounding_is_no_jump(num_wrong: int, size: float, size_of_input: float) -> None:
    assert not find(num_wrong, size, size_of_input)


def test_an_output_that_is_off_in_most_tokens_jumps() -> None:
    assert find(100, 0.05) == {"block"}
    assert find(100, 0.05, 0.005) == {"block"}


def test_a_module_whose_input_was_not_compared_does_not_jump() -> None:
    comparer = make_comparer()
    expected = torch.ones(NUM_TOKENS, 4, dtype=torch.float64)
    comparer._add_half(0, "block", expected, 2 * expected)
    assert not comparer.find_jumps(0, UNIT)
