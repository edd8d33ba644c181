"""Combinations that float8 does not support are refused early; torchao is not needed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from moeverify.cases.validation.rules import validate
from moeverify.faults.setting import make_case
from moeverify.model import float8_scaling
from moeverify.report.words.note import describe_obstacle
from moeverify.results.obstacle import RankLimit
from moeverify.verification.controller.machine import Machine
from moeverify.verification.controller.obstacles import find_obstacle

SHARP, ROWS = {"float8": "rowwise_with_gw_hp"}, {"float8": "rowwise", "precision": "bfloat16"}
MANY = RankLimit(most=64, by="processes")
ON_CPU = Machine("cpu", "auto", 0, MANY)

BROKEN: list[tuple[dict[str, Any], str, str, str]] = [
    (
        {"recipe": {"float8": "rowwise"}},
        "recipe.precision",
        "depend on the tokens of a rank",
        "rowwise_with_gw_hp",
    ),
    ({"recipe": {"float8": "tensorwise"}}, "recipe.precision", "no such difference", "another precision"),
    (
        {"recipe": SHARP, "model": {"hidden": 40}},
        "recipe.model.hidden",
        "hidden 40 is no multiple of 16",
        "use 48",
    ),
    (
        {"recipe": SHARP, "model": {"head_dim": 6, "num_heads": 4}},
        "recipe.model.num_heads",
        "width of all heads 24",
        "32",
    ),
    (
        {"recipe": ROWS, "moe": {"balance_scope": "batch"}},
        "recipe.model.moe.balance_scope",
        "depend on micro-batches",
        "`sequence`",
    ),
    (
        {"recipe": SHARP, "parallelize": "my.module:divide"},
        "recipe.float8",
        "your own function",
        "remove one",
    ),
    (
        {"recipe": SHARP, "dp_shard": 2, "compile": "parts"},
        "layout.compile",
        "together with float8",
        "remove it",
    ),
]


@pytest.mark.parametrize(("options", "path", "message", "remedy"), BROKEN)
def test_what_float8_cannot_be_combined_with(
    options: dict[str, Any], path: str, message: str, remedy: str
) -> None:
    (problem,) = validate(make_case("broken", **options))
    assert problem.path == path
    assert message in problem.message
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": SHARP},
        {"recipe": SHARP, "moe": {"balance_scope": "batch"}},
        {"recipe": {**ROWS, "precision": "mixed"}, "dp_shard": 2, "ep": 2},
        {
            "recipe": {**ROWS, "float8": "tensorwise"},
            "tp": 2,
            "pp": 2,
            "micro_batches": 2,
            "stage_layers": (2, 1),
        },
    ],
)
def test_what_it_can_be_combined_with(options: dict[str, Any]) -> None:
    assert validate(make_case("fine", **options)) == []


def test_without_torchao_a_case_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> None:
        assert name == "torchao"

    monkeypatch.setattr(float8_scaling.importlib.util, "find_spec", find_spec)
    missing = float8_scaling.FLOAT8.find("rowwise").find_obstacle(make_case("x", recipe=ROWS), "cpu", "gloo")
    assert missing is not None
    assert "pip install 'moeverify[float8]'" in describe_obstacle(missing)
    assert float8_scaling.FLOAT8.find("none").find_obstacle(make_case("x"), "cpu", "gloo") is None


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_gloo_cannot_send_what_torchao_gathers() -> None:
    one_scale = {**ROWS, "float8": "tensorwise"}
    gathers = make_case("x", recipe=one_scale, tp=2, sequence_parallel=True)
    assert find_obstacle(gathers, ON_CPU) is not None
    assert find_obstacle(gathers, Machine("cuda", "auto", 8, MANY)) is None
    assert find_obstacle(gathers, Machine("cuda", "auto", 1, MANY)) is not None
    assert find_obstacle(make_case("x", recipe=one_scale, tp=2), ON_CPU) is None
    assert find_obstacle(make_case("x", recipe=ROWS, tp=2, sequence_parallel=True), ON_CPU) is None
