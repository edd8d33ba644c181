"""The runs of one device that measure the noise of rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moeverify.cases.schema import Precision, Recipe
from moeverify.cases.validation.load import load_cases
from moeverify.train.assemble import assemble_single
from moeverify.train.program import TrainingProgram, compute_dtype_of
from moeverify.verification.golden_run.noise import perturbed_programs

CASES = Path(__file__).parents[4] / "cases"
CPU = torch.device("cpu")


def make_recipe(precision: Precision) -> Recipe:
    (case,) = load_cases([CASES / "ddp.yaml"])
    return case.recipe.model_copy(update={"precision": precision})


def read_weights(program: TrainingProgram, precision: Precision) -> Tensor:
    """Return all weights as a forward pass rounds them."""
    dtype = compute_dtype_of(precision)
    return torch.cat([shard.local().to(dtype).flatten() for shard in program.shards]).to(torch.float64)


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16", "mixed"])
def test_moved_weights_are_other_numbers_in_a_forward_pass(precision: Precision) -> None:
    recipe = make_recipe(precision)
    before = read_weights(assemble_single(recipe, CPU), precision)
    moved = read_weights(dict(perturbed_programs(recipe, CPU))["moved weights"], precision)
    unit = torch.finfo(compute_dtype_of(precision)).eps
    assert float((moved != before).to(torch.float64).mean()) > 0.25
    assert bool(((moved - before).abs() <= 2 * unit * before.abs()).all())
