"""Norms that lack a sum over an axis: over all parameters or some, per rank or combined wrongly."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from moeverify.explain.fitting.axes import Axes
from moeverify.explain.fitting.norm_slices import find_norm_of_slices
from moeverify.report.words.mistakes import describe_norm_of_slices
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Product
from moeverify.results.facts import ClipFacts
from moeverify.results.operation import NormOfSlices

# Four ranks, dp the outer axis; norms are replicated over tp, experts lie on ep, which has the ranks of dp.
AXES = Axes({"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]})
PARTS = {
    "embed.weight": {0: "0", 1: "1", 2: "2", 3: "3"},
    "layers.0.norm.weight": {0: "a", 1: "a", 2: "b", 3: "b"},
    "layers.0.moe.experts.up": {0: "x", 1: "x", 2: "y", 3: "y"},
    "layers.1.moe.experts.up": {0: "x;z", 1: "x;z", 2: "y", 3: "y"},
}
REGIONS = {
    "embed.weight": {"0": 1.1, "1": 0.7, "2": 1.9, "3": 0.4},
    "layers.0.norm.weight": {"a": 0.3, "b": 0.9},
    "layers.0.moe.experts.up": {"x": 2.3, "y": 0.6},
    "layers.1.moe.experts.up": {"x": 0.8, "z": 0.35, "y": 1.7},
}
HELD = {
    name: {rank: {part: REGIONS[name][part] for part in parts.split(";")} for rank, parts in known.items()}
    for name, known in PARTS.items()
}
SQUARES = {name: sum(known.values()) for name, known in REGIONS.items()}
EPS = 2.0**-23


def find(*squares: float, eps: float = EPS) -> NormOfSlices | None:
    norms = tuple(math.sqrt(square) * (1.0 + eps / 2.0) for square in squares)
    facts = ClipFacts(norms=norms, squares=SQUARES, held=HELD, parts=PARTS, eps=eps)
    return find_norm_of_slices(facts, AXES, noise=8.0 * eps)


def hold(ranks: Sequence[int], word: str = "") -> float:
    """Return these ranks' joint squares, of parameters with a word in the name and of all others."""
    total = 0.0
    for name, regions in REGIONS.items():
        held = {part for rank in ranks for part in PARTS[name][rank].split(";")}
        total += sum(square for part, square in regions.items() if part in held or word not in name)
    return total


TP = [[0, 2], [1, 3]]  # the ranks of each coordinate of tp
DP = [[0, 1], [2, 3]]


@pytest.mark.parametrize(("axis", "slices"), [("tp", TP), ("dp", DP)])
def test_each_rank_has_the_norm_of_its_own_coordinate(axis: str, slices: list[list[int]]) -> None:
    by_rank = {rank: hold(ranks) for ranks in slices for rank in ranks}
    found = find(*(by_rank[rank] for rank in range(4)))
    assert found == NormOfSlices(combination="own", axes=(Product(times=(axis,)),))


def test_each_rank_has_the_norm_of_what_it_holds() -> None:
    found = find(*(hold([rank]) for rank in range(4)))
    assert found is not None
    assert (found.combination, found.axes) == ("own", (Product(times=("dp", "tp")),))


@pytest.mark.parametrize(
    ("combination", "combine"),
    [
        ("mean", lambda squares: (sum(map(math.sqrt, squares)) / 2.0) ** 2),
        ("sum", lambda squares: sum(map(math.sqrt, squares)) ** 2),
        ("root-mean-square", lambda squares: sum(squares) / 2.0),
    ],
)
@pytest.mark.parametrize("word", ["", "experts"])
def test_the_ranks_combine_their_norms(
    combination: str, combine: Callable[[Sequence[float]], float], word: str
) -> None:
    found = find(*[combine([hold(ranks, word) for ranks in DP])] * 4)
    assert found is not None
    assert (found.combination, found.axes) == (combination, (Product(times=("dp",)),))
    assert (found.group is not None) == bool(word)
    if found.group is not None:
        assert all(word in name for name in found.group.tensors)


@pytest.mark.parametrize(
    ("combination", "combine"),
    [
        ("mean", lambda norms: sum(norms) / 2.0),
        ("sum", sum),
        ("root-mean-square", lambda norms: math.sqrt(sum(norm**2 for norm in norms) / 2.0)),
    ],
)
def test_the_norms_of_experts_are_combined_before_the_others_are_added(
    combination: str, combine: Callable[[Sequence[float]], float]
) -> None:
    others = sum(square for name, square in SQUARES.items() if "experts" not in name)
    norms = [math.sqrt(hold(ranks, "experts") - others) for ranks in DP]
    found = find(*[combine(norms) ** 2 + others] * 4)
    assert found is not None
    assert (found.combination, found.axes) == (combination, (Product(times=("dp",)),))
    assert found.group is not None
    assert all("experts" in name for name in found.group.tensors)
    if combination != "root-mean-square":  # there it equals the norm of all squares
        assert found.is_apart
        subject = Subject(quantity=Quantity.GRADIENT_NORM)
        said = describe_norm_of_slices(found, Explanation(cause=Cause.NORM, subject=subject, operation=found))
        assert f"is the square of the {combination} of their norms at each coordinate" in said


@pytest.mark.parametrize("word", ["", "experts"])
@pytest.mark.parametrize("coordinate", [0, 1])
def test_all_ranks_have_the_norm_of_one_coordinate(coordinate: int, word: str) -> None:
    squares = [hold(ranks, word) for ranks in DP]
    found = find(*[squares[coordinate]] * 4)
    assert found is not None
    assert (found.combination, found.axes) == ("one", (Product(times=("dp",)),))
    assert (found.coordinate, found.is_largest) == (coordinate, squares[coordinate] == max(squares))
    subject = Subject(quantity=Quantity.GRADIENT_NORM)
    said = describe_norm_of_slices(found, Explanation(cause=Cause.NORM, subject=subject, operation=found))
    assert f"only those of the ranks at coordinate {coordinate}" in said
    assert ("where it is largest" in said) == found.is_largest


def test_a_right_norm_and_one_that_is_off_otherwise_are_not_explained() -> None:
    total, draw = hold(range(4)), random.Random(0)
    assert find(*[total] * 4) is None
    wrong = [10.0 ** draw.uniform(-3.0, -0.3) * total for _ in range(2000)]
    assert sum(find(*[total - each] * 4) is not None for each in wrong) <= 4
    assert find(*[math.nan] * 4) is None


def test_a_norm_of_16_bits_says_nothing() -> None:
    assert find(*[hold(ranks) for ranks in (DP[0], DP[0], DP[1], DP[1])], eps=2.0**-7) is None
