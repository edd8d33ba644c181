"""Mixed precision on one device: float32 parameters, and a model that computes in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from moeverify.cases.schema import Recipe
from moeverify.cases.validation.load import build_case
from moeverify.model.mixed_precision import Narrowed
from moeverify.model.transformer import ModelOutput
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import make_batches
from moeverify.train.program import Program, compute_dtype_of, dtype_of

CPU = torch.device("cpu")


def make_recipe(preset: str = "stress", precision: str = "mixed") -> Recipe:
    model = {"preset": preset}
    fields = {"model": model, "data": {"batch": 4, "seq_len": 8}, "precision": precision}
    return build_case({"name": "mixed", "recipe": fields, "layout": {"dp_shard": 2}}).recipe


def run(recipe: Recipe, program: Program) -> ModelOutput:
    (batch,) = make_batches(recipe, program, 0)
    output: ModelOutput = program.model(batch.tokens, batch.positions, batch.valid)
    return output


def tensors(output: ModelOutput) -> Iterator[Tensor]:
    yield output.logits
    for stats in output.routers:
        yield from stats


@pytest.mark.parametrize("preset", ["stress", "stress-tied"])
def test_forward_is_that_of_a_bfloat16_model_with_the_rounded_weights(preset: str) -> None:
    recipe = make_recipe(preset)
    mixed = assemble_single(recipe, CPU)
    narrow = assemble_single(make_recipe(preset, "bfloat16"), CPU)
    assert isinstance(mixed.model, Narrowed)
    for wide, other in zip(mixed.shards, narrow.shards, strict=True):
        assert wide.name == other.name
        other.local().copy_(wide.local().to(torch.bfloat16))
    for expected, actual in zip(tensors(run(recipe, narrow)), tensors(run(recipe, mixed)), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("preset", ["stress", "stress-tied"])
def test_gradients_are_those_of_the_bfloat16_model_in_float32(preset: str) -> None:
    recipe = make_recipe(preset)
    mixed, narrow = assemble_single(recipe, CPU), assemble_single(make_recipe(preset, "bfloat16"), CPU)
    for wide, other in zip(mixed.shards, narrow.shards, strict=True):
        other.local().copy_(wide.local().to(torch.bfloat16))
    for program in (mixed, narrow):
        torch.autograd.backward(run(recipe, program).logits.float().square().mean())
    for wide, other in zip(mixed.shards, narrow.shards, strict=True):
        expected, actual = other.tensor.grad, wide.tensor.grad
        assert expected is not None, other.name
        assert actual is not None, wide.name
        assert actual.dtype == torch.float32
        assert torch.equal(actual, expected.float()), wide.name


def test_micro_batches_add_up_in_float32() -> None:
    linear = nn.Linear(1, 1, bias=False)
    narrowed = Narrowed(linear, torch.bfloat16)
    for value in (1.0, 2.0**-10):  # bfloat16 would drop the second addend
        narrowed(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.item() == 1.0 + 2.0**-10


def test_parameters_hold_the_float32_values_and_buffers_stay() -> None:
    recipe = make_recipe()
    mixed, single = assemble_single(recipe, CPU), assemble_single(make_recipe(precision="float32"), CPU)
    pairs = [
        *zip(mixed.shards, single.shards, strict=True),
        *zip(mixed.buffers, single.buffers, strict=True),
    ]
    for ours, theirs in pairs:
        assert (ours.name, ours.local().dtype) == (theirs.name, torch.float32)
        assert torch.equal(ours.local(), theirs.local())


def test_golden_of_a_mixed_recipe_is_in_float64_at_values_of_float32() -> None:
    golden = assemble_single(make_recipe(), CPU, compute="float64")
    assert not isinstance(golden.model, Narrowed)
    for held in golden.shards:
        assert held.local().dtype == torch.float64
        assert torch.equal(held.local(), held.local().float().double())


def test_dtypes_of_a_precision() -> None:
    assert (dtype_of("mixed"), compute_dtype_of("mixed")) == (torch.float32, torch.bfloat16)
    for name in ("float64", "float32", "bfloat16"):
        assert dtype_of(name) == compute_dtype_of(name) == getattr(torch, name)
