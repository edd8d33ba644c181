"""Weights of the batch's shares, and the procedures that give them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from wrong_tensors import draw

from moeverify.diagnose.components import Cell, Components
from moeverify.diagnose.fit import Fit
from moeverify.diagnose.weighted_shares import find_by_number, find_own_tokens, find_partial_clip
from moeverify.results.operation import ByNumber, PartialClip
from moeverify.results.part import Part, Tokens
from moeverify.train.clipping import GUARD

COUNTS = (5, 9, 7, 3)
MAX_NORM = 0.5


def components(num_ranks: int, num_micro_batches: int) -> Components:
    """Return parts of two parameters, of each rank and micro-batch."""
    tokens = [
        Tokens(data_rank=rank, micro_batch=number if num_micro_batches > 1 else None)
        for rank in range(num_ranks)
        for number in range(num_micro_batches)
    ]
    cells = tuple(Cell(each, (), ()) for each in tokens)
    parts = [{"a": draw(3, 4, seed=seed), "b": draw(5, seed=50 + seed)} for seed in range(len(cells))]
    names = tuple(parts[0])
    return Components(cells, {"lm": parts}, {}, COUNTS[: len(cells)], names)


def fit_of(known: Components, weights: Mapping[Tokens, float]) -> Fit:
    parts = tuple(Part(tokens=cell.tokens) for cell in known.cells)
    coefficients = tuple(weights[cell.tokens] for cell in known.cells)
    return Fit(parts, coefficients, 0.0, lambda coefficients: 0.0, 17)


def norm_of(known: Components, weights: Mapping[Tokens, float]) -> float:
    total = 0.0
    for name in known.names:
        summed: Tensor = sum(
            (
                weights.get(cell.tokens, 0.0) * known.share(number, name)
                for number, cell in enumerate(known.cells)
            ),
            torch.zeros(()),
        )
        total += float(summed.square().sum())
    return math.sqrt(total)


def clip(norm: float) -> float:
    return min(1.0, MAX_NORM / (norm + GUARD))


def test_each_rank_clips_its_gradient_before_they_are_summed() -> None:
    known = components(4, 1)
    # What a rank has before the average over four of them is four times its part.
    weights = {cell.tokens: clip(4.0 * norm_of(known, {cell.tokens: 1.0})) for cell in known.cells}
    found = find_partial_clip(fit_of(known, weights), known, MAX_NORM)
    assert found == PartialClip(clipped="micro-batch", by_own=True)


def test_all_ranks_clip_each_micro_batch() -> None:
    known = components(2, 2)
    weights: dict[Tokens, float] = {}
    for number in range(2):
        inside = {cell.tokens: 1.0 for cell in known.cells if cell.tokens.micro_batch == number}
        weights |= dict.fromkeys(inside, clip(norm_of(known, inside)))
    found = find_partial_clip(fit_of(known, weights), known, MAX_NORM)
    assert found == PartialClip(clipped="micro-batch")


def test_each_rank_clips_what_it_has_accumulated() -> None:
    known = components(2, 2)
    weights: dict[Tokens, float] = {}
    for rank in range(2):
        first, second = (cell.tokens for cell in known.cells if cell.tokens.data_rank == rank)
        weights[first], weights[second] = clip(norm_of(known, {first: 1.0})), 1.0
        again = clip(norm_of(known, {first: weights[first], second: 1.0}))
        weights[first], weights[second] = again * weights[first], again
    found = find_partial_clip(fit_of(known, weights), known, MAX_NORM)
    assert found == PartialClip(clipped="accumulated", by_own=True)


def test_other_weights_are_no_clip() -> None:
    known = components(2, 2)
    other = dict(zip((cell.tokens for cell in known.cells), (0.5, 0.7, 1.0, 0.9), strict=True))
    assert find_partial_clip(fit_of(known, other), known, MAX_NORM) is None
    equal = dict.fromkeys((cell.tokens for cell in known.cells), 0.5)
    assert find_partial_clip(fit_of(known, equal), known, MAX_NORM) is None
    assert find_partial_clip(fit_of(known, other), known, None) is None


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((81.0, 96.0, 40.0), "times"),
        ((1 / 81, 1 / 96, 1 / 40), "divided"),
        ((243 / 217, 288 / 217, 120 / 217), "share"),
        ((81.0, 96.0, 41.0), None),
        ((162.0, 192.0, 80.0), None),
    ],
)
def test_weights_by_the_ranks_own_tokens(weights: tuple[float, ...], expected: str | None) -> None:
    assert find_own_tokens(weights, (81, 96, 40)) == expected


def test_equal_numbers_of_tokens_are_a_factor_like_any_other() -> None:
    assert find_own_tokens((64.0, 64.0), (64, 64)) is None
    assert find_own_tokens((0.0, 64.0), (0, 64)) is None


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1.0, 1.0 / 2.0, 1.0 / 3.0), ByNumber(way="divided")),
        ((0.49, 0.7, 1.0), ByNumber(way="decaying", ratio=0.7)),
        ((1.0, 1.5, 2.25), ByNumber(way="falling", ratio=1.5)),
        ((0.7, 0.7, 0.7), None),
        ((0.49, 0.7, 0.9), None),
    ],
)
def test_weights_that_are_of_the_numbers_of_micro_batches(
    weights: tuple[float, ...], expected: ByNumber | None
) -> None:
    known = replace(components(2, 3), num_valid=(5, 9, 7, 3, 4, 6))
    fit = fit_of(known, {cell.tokens: weights[cell.tokens.micro_batch or 0] for cell in known.cells})
    found = find_by_number(fit, known)
    if expected is None or found is None:
        assert found is expected
    else:
        assert (found.way, found.ratio) == (expected.way, pytest.approx(expected.ratio))


def test_weights_that_differ_between_ranks_are_none_of_numbers() -> None:
    known = components(2, 2)
    fit = fit_of(known, {cell.tokens: 1.0 + number for number, cell in enumerate(known.cells)})
    assert find_by_number(fit, known) is None
