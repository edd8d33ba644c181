"""Squares that a float32 norm does not count exactly once, identified from the run's own gradients."""

from __future__ import annotations

import math
import random

import pytest

from moeverify.explain.fitting.axes import Axes
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.recomputed_norm import explain_norm
from moeverify.results.checks import CheckName, Kind
from moeverify.results.explanation import Explanation
from moeverify.results.factor import Product, Source
from moeverify.results.facts import ClipFacts
from moeverify.results.finding import Finding
from moeverify.results.operation import Scaled, Unreduced
from moeverify.results.place import Place, Stage

SQUARES = {
    f"layers.{layer}.{leaf}.weight": square * (1.0 + 0.1 * layer)
    for layer in range(3)
    for leaf, square in {"up": 1.0, "down": 0.7, "norm": 0.02, "q_norm": 0.004}.items()
}
TP = Axes({"tp": [[0, 1]]}, [Source(name="tp", size=2)])
EPS = 2.0**-23


def explain(*squares: float) -> Explanation | None:
    """Return the explanation for two ranks with these squared norms, where norms are replicated over tp."""
    norms = tuple(math.sqrt(square) * (1.0 + EPS) for square in squares)
    parts = {name: {0: "all", 1: "all"} if "norm" in name else {0: "0:1", 1: "1:2"} for name in SQUARES}
    right = math.sqrt(sum(SQUARES.values()))
    finding = Finding(
        check=CheckName.CLIP,
        kind=Kind.GRADIENT_NORM,
        tensor="total",
        step=0,
        rank=0,
        error=0.1,
        bound=1e-6,
        expected=right,
        actual=norms[0],
        place=Place(stage=Stage.GRADIENT_NORM),
        facts=ClipFacts(norms=norms, squares=SQUARES, parts=parts, eps=EPS),
    )
    assert "squares" not in finding.model_dump_json()
    found = explain_norm(finding, finding.facts, DiagnosisInputs(axes=TP))
    return found.explanation


def count(words: str, times: float) -> float:
    return sum(square * (times if words in name else 1.0) for name, square in SQUARES.items())


@pytest.mark.parametrize(
    ("words", "times", "num_tensors"),
    [
        ("norm", 2.0, 6),
        (".q_norm", 2.0, 3),
        (".up", 0.0, 3),
        ("layers.1.down", 2.0, 1),
        ("layers.2.norm", 0.0, 1),
    ],
)
def test_the_group_that_counts_otherwise_is_named(words: str, times: float, num_tensors: int) -> None:
    explanation = explain(*[count(words, times)] * 2)
    assert explanation is not None
    assert isinstance(explanation.operation, Scaled)
    (wrong,) = explanation.operation.contributions
    assert wrong.part.group is not None
    assert (len(wrong.part.group.tensors), wrong.factor.value) == (num_tensors, times)
    assert all(words in name for name in wrong.part.group.tensors)


def test_all_that_counts_twice_is_a_factor_of_the_whole() -> None:
    explanation = explain(*[2.0 * count("", 1.0)] * 2)
    assert explanation is not None
    assert explanation.candidates == (Product(times=("tp",)),)


def test_squares_of_the_ranks_that_add_up_are_a_missing_sum() -> None:
    total = count("", 1.0)
    explanation = explain(0.4 * total, 0.6 * total)
    assert explanation is not None
    assert isinstance(explanation.operation, Unreduced)
    assert explain(0.4 * total, 0.5 * total) is None


def test_a_norm_that_is_off_by_any_amount_is_rarely_explained() -> None:
    total, draw = count("", 1.0), random.Random(0)
    excesses = [10.0 ** draw.uniform(-4.0, -0.3) * total for _ in range(1000)]
    named = [excess for excess in excesses if explain(*[total + excess] * 2) is not None]
    assert len(named) <= 5
