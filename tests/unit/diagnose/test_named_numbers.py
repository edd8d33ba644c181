"""Factors that are numbers of the run: named where they are, and hardly ever by chance."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from wrong_tensors import WEIGHT, draw, examine, make_inputs, make_tensor

from moeverify.axes.groups import BRANCHES, WEIGHT_COLUMNS, WEIGHT_ROWS
from moeverify.axes.named_numbers import list_options, list_sizes
from moeverify.diagnose.named_numbers import NamedNumbers, name_factor
from moeverify.faults.setting import make_case
from moeverify.report.words.factor import describe_factor
from moeverify.results.factor import Product

SIZES = {
    BRANCHES: 6,
    "layers": 3,
    "hidden": 32,
    "head_dim": 8,
    "heads": 4,
    "ffn_hidden": 64,
    "vocab_size": 96,
    "experts": 10,
    "expert_hidden": 24,
    WEIGHT_COLUMNS: 40,
    WEIGHT_ROWS: 56,
}
OPTIONS = {"lr": 0.01, "the first beta": 0.9, "weight_decay": 0.3, "clip_norm": 1.7, "route_scale": 2.5}
NUMBERS = NamedNumbers(SIZES, OPTIONS)
FIRST = (BRANCHES, WEIGHT_COLUMNS, WEIGHT_ROWS)


@pytest.mark.parametrize(
    ("value", "power", "product"),
    [
        (1.0 / math.sqrt(6), 2, Product(over=(BRANCHES,))),
        (math.sqrt(32), 2, Product(times=("hidden",))),
        (math.sqrt(40 / 56), 2, Product(times=(WEIGHT_COLUMNS,), over=(WEIGHT_ROWS,))),
        (96.0, 1, Product(times=("vocab_size",))),
        (24 / 32, 1, None),
        (96 / 56, 1, Product(times=("vocab_size",), over=(WEIGHT_ROWS,))),
        (2.5, 1, Product(times=("route_scale",))),
        (1.0 / 1.7, 1, Product(over=("clip_norm",))),
        (0.1, 1, None),
        (4.0, 1, None),
    ],
)
def test_numbers_of_the_run_are_named(value: float, power: int, product: Product | None) -> None:
    found = name_factor(value, NUMBERS, error=1e-8, first=FIRST)
    if product is None:  # it has few digits, as numbers that somebody writes
        assert found is None
        return
    assert found is not None
    assert (found.power, product in found.equals) == (power, True)
    assert "axis" not in describe_factor(found)


@pytest.mark.parametrize("error", [1e-8, 1e-6, 1e-4, 1e-3, 4e-3])
def test_random_factors_are_hardly_ever_named(error: float) -> None:
    generator = random.Random(0)
    values = [math.exp(generator.uniform(-4.0, 4.0)) for _ in range(2000)]
    named = sum(name_factor(value, NUMBERS, error=error, first=FIRST) is not None for value in values)
    assert named / len(values) < 0.02


def test_numbers_of_two_digits_are_seldom_named() -> None:
    generator = random.Random(0)
    values = [float(f"{math.exp(generator.uniform(-4.0, 4.0)):.2g}") for _ in range(2000)]
    assert sum(name_factor(value, NUMBERS, error=1e-8) is not None for value in values) / len(values) < 0.05


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_initial_values_of_another_deviation_are_named(dtype: torch.dtype) -> None:
    expected = draw(64, 40).to(dtype).double()
    wrong = (expected / math.sqrt(6)).to(dtype).double()
    name = "layers.0.mlp.up_proj.weight"
    tensor = make_tensor(expected, wrong, name=name, kind="initial_weight", precision=dtype)
    inputs = replace(make_inputs(tensor), named=NamedNumbers({BRANCHES: 6, "layers": 3}))
    explanation = examine("scaled_values", tensor, inputs).explanation
    assert explanation is not None
    assert "1/residual branches (2 a layer)" in describe_factor(explanation.factors[0])


def test_sizes_and_options_are_those_of_the_case() -> None:
    case = make_case("numbers")
    sizes, options = list_sizes(case), list_options(case)
    assert case.recipe.model.reference is not None
    assert sizes[BRANCHES] == 2 * case.recipe.model.reference.num_layers
    assert options["lr"] == case.recipe.optimizer.lr


def name_initial(shape: tuple[int, ...], deviation: float) -> str:
    """Return what is said of initial values of another deviation than the recipe's, 0.1."""
    expected = draw(*shape)
    tensor = make_tensor(expected, expected * (deviation / 0.1), name=WEIGHT, kind="initial_weight")
    inputs = replace(make_inputs(tensor), named=NamedNumbers(SIZES, {"init_std": 0.1}))
    explanation = examine("scaled_values", tensor, inputs).explanation
    assert explanation is not None
    return describe_factor(explanation.factors[0])


@pytest.mark.parametrize(
    ("shape", "deviation", "said"),
    [
        ((24, 48), 48**-0.5, "1/(columns of the weight * init_std * init_std)"),
        ((24, 48), 24**-0.5, "1/(rows of the weight * init_std * init_std)"),
        ((20, 48), (2 / 48) ** 0.5, "1/(half of the columns of the weight * init_std * init_std)"),
        ((20, 50), (2 / 70) ** 0.5, "1/(half of the rows and columns of the weight * init_std * init_std)"),
        ((48, 48), 48**-0.5, "1/(rows of the weight * init_std * init_std) = 1/(columns of the weight"),
    ],
)
def test_deviations_of_the_fans_in_place_of_the_recipes_are_named(
    shape: tuple[int, ...], deviation: float, said: str
) -> None:
    assert said in name_initial(shape, deviation)


def test_other_deviations_are_not_said_to_be_of_the_fans() -> None:
    generator = random.Random(0)
    said = [name_initial((24, 48), math.exp(generator.uniform(-4.0, 1.0))) for _ in range(300)]
    assert sum("init_std" in each for each in said) / len(said) < 0.02


def test_a_width_over_the_number_of_layers_is_no_name() -> None:
    assert name_factor(math.sqrt(56 / 3), NUMBERS, error=1e-8, first=(*FIRST, "layers")) is None
