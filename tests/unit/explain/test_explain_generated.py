"""Random programs: an equivalent rewrite is never blamed, and a mutation is found at its line."""

from __future__ import annotations

import random

import pytest
import torch
from generated import Generated, explain, generate, make_inputs, mutate, record, rewrite

from moeverify.explain.program import Program

pytestmark = pytest.mark.slow

SEEDS = range(1000, 1025)
LENGTH = 14
LOCATED = 0.9
"""Share of mutations whose line comes first. Others are known to lie between right inputs and a wrong result."""


def make_programs(seed: int) -> tuple[Generated, Generated, Generated]:
    """Return a program, an equivalent one, and one with a wrong line."""
    rng = random.Random(seed)
    program = generate(rng, LENGTH)
    same = rewrite(program, rng)
    return program, same, rewrite(mutate(program, rng), rng)


def record_both(one: Generated, other: Generated, seed: int) -> tuple[Program, Program, bool]:
    """Return the recordings of two programs with the same inputs, and whether their results are equal."""
    inputs = make_inputs(seed)
    (first, right), (second, result) = record(one, "one", inputs), record(other, "ranks", inputs)
    return first, second, torch.allclose(result, right, rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rewrite_is_never_blamed(seed: int) -> None:
    one, same, _ = make_programs(seed)
    expected, actual, is_same = record_both(one, same, seed)
    if not is_same:
        pytest.skip("rounding has grown")
    assert explain(actual, expected) == []


def test_most_mutations_are_found_at_their_line() -> None:
    located: dict[int, bool] = {}
    for seed in SEEDS:
        one, _, bad = make_programs(seed)
        expected, actual, is_same = record_both(one, bad, seed)
        if is_same:
            continue
        lines = [culprit.here.line for culprit in explain(actual, expected)]
        # Line 1 of the text is the head of the function, and lines count from 1.
        located[seed] = bool(lines) and lines[0] is not None and lines[0].line - 2 == bad.mutated
    missed = [seed for seed, is_located in located.items() if not is_located]
    assert len(located) >= len(SEEDS) // 2
    assert len(missed) <= (1 - LOCATED) * len(located), missed
