"""Properties of the model under test, for the reference model and for a user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeverify.cases.schema import CustomModel, Recipe
from moeverify.errors import CaseError
from moeverify.faults.setting import make_case
from moeverify.train.assemble import assemble_single
from moeverify.train.data import whole_share
from moeverify.train.forward import compute_losses
from moeverify.train.loop import make_batches
from moeverify.train.objective import count_valid
from moeverify.train.program import TrainingProgram
from moeverify.train.routers import find_routers
from moeverify.train.subject import GradientParts, Vector
from moeverify.train.subjects import subject_of
from moeverify.train.target import import_path

CPU = torch.device("cpu")
PROGRAM = """
import torch
from torch import nn
from torch.nn import functional as F


class Small(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.inner = nn.Linear(width, width)
        self.unused = nn.Linear(1, 1)
        self.head = nn.Linear(width, 16)

    def forward(self, tokens):
        return self.head(torch.tanh(self.inner(self.embed(tokens))))


def summed(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)


def each(model, tokens, targets):
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none", ignore_index=-100)
    return loss.view(targets.shape)


def grouped(model, tokens, targets):
    hidden = model.embed(tokens).flatten(0, 1)
    experts = model.head.weight.T.unsqueeze(0)
    logits = torch._grouped_mm(hidden, experts, offs=torch.tensor([len(hidden)], dtype=torch.int32))
    return F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=-100)


def broken(model, tokens, targets):
    return model(tokens) @ torch.zeros(3)


def never_for_nothing(model, tokens, targets):
    assert (targets != -100).any(), "called without a token"
    return summed(model, tokens, targets)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("own")
    (path / "own_subject.py").write_text(PROGRAM)
    return str(path)


def make_recipe(kind: str) -> Recipe:
    recipe = make_case("subject", model={"num_layers": 2}, data={"batch": 4, "min_valid": 0.3}).recipe
    if kind == "reference":
        return recipe
    loss = None if kind == "plain" else f"own_subject:{kind}"
    model = CustomModel(factory="own_subject:Small", loss=loss, vocab_size=16)
    return recipe.model_copy(update={"model": model})


KINDS = ["reference", "plain", "summed", "each", "never_for_nothing"]


def take_apart(recipe: Recipe, program: TrainingProgram) -> tuple[GradientParts, Tensor]:
    """Return the parts of the first step's gradient, and the mask of valid tokens."""
    batch = program.subject.make_batch(0, whole_share(recipe.data), CPU)
    return program.subject.split_gradient(program, batch), batch.valid


def whole_gradient(recipe: Recipe, program: TrainingProgram) -> Vector:
    [batch] = make_batches(recipe, program, 0)
    losses, _ = compute_losses(recipe, program, batch, count_valid([batch], program.sums, recipe.data.batch))
    losses.total.backward()
    return {
        shard.name: torch.zeros_like(shard.tensor) if shard.tensor.grad is None else shard.tensor.grad
        for shard in program.shards
    }


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_rows_and_positions_add_up_to_the_gradient(kind: str, folder: str) -> None:
    recipe = make_recipe(kind)
    with import_path([folder]):
        program = assemble_single(recipe, CPU, compute="float64")
        whole = whole_gradient(recipe, program)
        parts, valid = take_apart(recipe, program)
        cells = []
        for rows in (slice(0, 1), slice(1, 4)):
            for positions in (slice(0, 8), slice(8, 16)):
                mask = torch.zeros_like(valid)
                mask[rows, positions] = True
                cells.append(parts.gradients(mask & valid))
    for name, expected in whole.items():
        total = torch.stack([term[name] for cell in cells for term in cell.values()]).sum(dim=0)
        torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-14, msg=name)
    terms = ("lm", "balance", "z") if kind == "reference" else ("lm",)
    assert {tuple(cell) for cell in cells} == {terms}


def test_a_loss_is_not_asked_for_no_token_at_all(folder: str) -> None:
    recipe = make_recipe("never_for_nothing")
    with import_path([folder]):
        parts, valid = take_apart(recipe, assemble_single(recipe, CPU, compute="float64"))
        found = parts.gradients(torch.zeros_like(valid))
    assert all(not bool(gradient.any()) for term in found.values() for gradient in term.values())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_known_of_the_inside(kind: str, folder: str) -> None:
    recipe, is_reference = make_recipe(kind), kind == "reference"
    subject = subject_of(recipe)
    assert subject.can_replay == is_reference
    # 16 experts: layer 0 is dense, and the router has a row for each expert too, but stacks none.
    assert subject.count_experts("layers.1.moe.experts.gate", (16, 32, 32)) == (16 if is_reference else 0)
    assert subject.count_experts("layers.1.moe.router.weight", (16, 32)) == 0
    with import_path([folder]):
        model = subject.build(CPU, torch.float64)
    found = [router.name for router in find_routers(model)]
    assert found == (["layers.1.moe.router"] if is_reference else [])
    assert (recipe.model.moe is not None, recipe.model.functions == {}) == (is_reference, is_reference)


def test_functions_are_named_by_their_fields() -> None:
    model: Any = make_recipe("summed").model
    assert model.functions == {
        "recipe.model.factory": "own_subject:Small",
        "recipe.model.loss": "own_subject:summed",
    }
    assert make_recipe("plain").model.functions == {"recipe.model.factory": "own_subject:Small"}


def test_initial_values_of_a_users_model_are_rounded_to_the_recipes_precision(folder: str) -> None:
    recipe = make_recipe("plain").model_copy(update={"precision": "bfloat16"})
    with import_path([folder]):
        wide = subject_of(recipe).build(CPU, torch.float64)
    weight = next(wide.parameters()).detach()
    assert weight.dtype == torch.float64
    assert torch.equal(weight, weight.to(torch.bfloat16).to(torch.float64))


def test_a_factory_that_fails_is_named(folder: str) -> None:
    recipe = make_recipe("plain")
    broken = recipe.model_copy(update={"model": recipe.model.model_copy(update={"arguments": {"depth": 3}})})
    with import_path([folder]), pytest.raises(CaseError, match=r"`own_subject:Small` failed: TypeError"):
        subject_of(broken).build(CPU, torch.float64)


def test_an_operator_that_refuses_float64_is_answered_with_a_precision(folder: str) -> None:
    with import_path([folder]):
        recipe = make_recipe("grouped")
        program = assemble_single(recipe, CPU)
        batch = make_batches(recipe, program, 0)[0]
        with pytest.raises(CaseError) as error:
            compute_losses(recipe, program, batch, count_valid([batch], program.sums, 8))
    (problem,) = error.value.problems
    assert problem.path == "recipe.precision"
    assert "write precision: float32" in str(problem)


def test_any_other_failure_of_a_model_is_left_as_it_is(folder: str) -> None:
    with import_path([folder]):
        recipe = make_recipe("broken")
        program = assemble_single(recipe, CPU)
        batch = make_batches(recipe, program, 0)[0]
        with pytest.raises(RuntimeError, match="size mismatch"):
            compute_losses(recipe, program, batch, count_valid([batch], program.sums, 8))
