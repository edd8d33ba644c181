"""Choices near a tie: kept by a golden, repeated by runs whose rows are the same up to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moeverify.cases.schema import CustomModel, Data, Precision, Recipe
from moeverify.cases.validation.load import load_cases
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind
from moeverify.train import near_ties
from moeverify.train.near_ties import NearTies, follow_near_ties
from moeverify.train.program import NearTieCounts

ROOT = Path(__file__).parents[3]


class Kept:
    """A golden in memory: an observer, and the tensors of each step."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, str, str], Tensor] = {}

    def begin_step(self, step: int) -> None:
        pass

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        assert local is not None
        assert tuple(local.shape) == region.shape
        self.found[step, kind, name] = local

    def read(self, step: int, kind: str, name: str, region: Region) -> Tensor | None:
        raise AssertionError("near ties have no regions")

    def find(self, step: int, kind: str, name: str) -> Tensor | None:
        return self.found.get((step, kind, name))


def make_recipe(precision: Precision = "bfloat16") -> Recipe:
    model = CustomModel(factory="a:b", vocab_size=8)
    return Recipe(name="r", model=model, precision=precision, data=Data(batch=2, seq_len=4))


def keep(scores: Tensor, step: int = 0, operator: Any = torch.topk, *arguments: Any) -> Kept:
    """Return a golden that has made the choices of a float64 run among scores."""
    golden = Kept()
    ties = NearTies(make_recipe(), None, NearTieCounts())
    ties.begin_step(step)
    with ties:
        operator(scores, *(arguments or (1,)))
    ties.show(golden)
    return golden


def repeat(golden: Kept, step: int = 0, counts: NearTieCounts | None = None) -> NearTies:
    ties = NearTies(make_recipe(), golden, counts or NearTieCounts())
    ties.begin_step(step)
    return ties


SCORES = torch.tensor(
    [[0.500, 0.502, 0.1, 0.2], [0.9, 0.1, 0.2, 0.3], [0.30, 0.1, 0.301, 0.2]], dtype=torch.float64
)
ROUNDED = torch.tensor(
    [[0.502, 0.500, 0.1, 0.2], [0.9, 0.1, 0.2, 0.3], [0.301, 0.1, 0.30, 0.2]], dtype=torch.bfloat16
)


def test_rows_near_a_tie_alone_are_kept() -> None:
    golden = keep(SCORES)
    [(step, kind, name)] = golden.found
    assert (step, kind) == (0, Kind.NEAR_TIES)
    kept = golden.found[step, kind, name]
    numbers, chosen = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [2.0]])
    assert torch.equal(kept, torch.cat([numbers, SCORES[[0, 2]], chosen], dim=1))


def test_rows_are_numbered_through_all_calls_of_a_step() -> None:
    golden = Kept()
    ties = NearTies(make_recipe(), None, NearTieCounts())
    for step in (0, 1):
        ties.begin_step(step)
        with ties:
            SCORES.topk(1)
            SCORES[2:].topk(1)
        ties.show(golden)
        kept = golden.find(step, Kind.NEAR_TIES, "topk 1 of 4")
        assert kept is not None
        assert kept[:, 0].tolist() == [0, 2, 3]


def test_a_run_repeats_the_choice_and_takes_its_number() -> None:
    counts = NearTieCounts()
    with repeat(keep(SCORES), counts=counts):
        values, indices = ROUNDED.topk(1)
    assert indices.flatten().tolist() == [1, 0, 2]
    assert torch.equal(values, ROUNDED.gather(1, indices))
    assert (counts.num_rows, counts.num_changed) == (2, 2)


def test_a_row_that_the_golden_does_not_have_is_counted_as_free() -> None:
    counts = NearTieCounts()
    with repeat(keep(SCORES), counts=counts):
        _, indices = (3.0 * ROUNDED).topk(1)
    assert indices.flatten().tolist() == [0, 0, 0]
    assert (counts.num_rows, counts.num_changed, counts.num_free) == (2, 0, 2)


def test_the_gradient_goes_to_the_repeated_choice() -> None:
    scores = ROUNDED.clone().requires_grad_()
    with repeat(keep(SCORES)):
        scores.topk(1).values.sum().backward()
    assert scores.grad is not None
    assert scores.grad.nonzero().tolist() == [[0, 1], [1, 0], [2, 2]]


def test_a_checkpointed_layer_repeats_the_choice_in_the_backward_pass() -> None:
    made: list[Tensor] = []

    def choose(scores: Tensor) -> Tensor:
        values, indices = scores.topk(1)
        made.append(indices)
        return values.sin()

    scores = ROUNDED.clone().requires_grad_()
    with repeat(keep(SCORES)):
        checkpoint(choose, scores, use_reentrant=False).sum().backward()
    assert [indices.flatten().tolist() for indices in made] == [[1, 0, 2], [1, 0, 2]]


@pytest.mark.parametrize("shape", [(3, 1, 4), (1, 3, 4)])
def test_rows_are_found_in_any_order_and_shape(shape: tuple[int, ...]) -> None:
    with repeat(keep(SCORES)):
        indices = ROUNDED.flip(0).reshape(shape).topk(1).indices
    assert indices.flatten().tolist() == [2, 0, 1]


ALIKE = torch.tensor(
    [[0.50, 0.49, 0.1], [0.20, 0.10, 0.2], [0.51, 0.47, 0.1], [0.48, 0.49, 0.1], [0.30, 0.29, 0.3]],
    dtype=torch.float64,
)
"""Rounding makes row 2 or row 0 look like row 3, which has another choice."""


@pytest.mark.parametrize("first", [0, 2])
def test_the_rows_around_it_tell_a_row_from_others_that_are_alike(first: int) -> None:
    rows = ALIKE[first:].to(torch.bfloat16)
    rows[0] = torch.tensor([0.485, 0.48, 0.1])
    with repeat(keep(ALIKE)):
        assert torch.equal(rows.topk(1).indices, ALIKE[first:].topk(1).indices)


def test_without_rows_around_it_a_row_is_the_nearest_one() -> None:
    row = torch.tensor([[0.485, 0.48, 0.1]], dtype=torch.bfloat16)
    with repeat(keep(ALIKE)):
        assert row.topk(1).indices.item() == 1


def test_the_order_of_chosen_numbers_is_repeated() -> None:
    with repeat(keep(SCORES, 0, torch.topk, 2)):
        assert ROUNDED.topk(2).indices.tolist() == [[1, 0], [0, 3], [2, 0]]


@pytest.mark.parametrize("operator", [torch.argmax, torch.max])
def test_other_operators_repeat_choices(operator: Any) -> None:
    with repeat(keep(SCORES, 0, operator, 1)):
        made = operator(ROUNDED, 1)
    indices = made if isinstance(made, Tensor) else made.indices
    assert indices.tolist() == [1, 0, 2]


def test_smallest_numbers_are_choices_too() -> None:
    with repeat(keep(SCORES, 0, torch.topk, 1, 1, False)):
        assert ROUNDED.topk(1, 1, False).indices.flatten().tolist() == [2, 1, 1]
    golden = keep(-SCORES, 0, torch.topk, 1, 1, False)
    with repeat(golden):
        assert (-ROUNDED).topk(1, 1, False).indices.flatten().tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    "scores",
    [
        ROUNDED + torch.tensor([0.1, 0, 0, 0]),  # the first number is larger by more than rounding
        torch.rand(3, 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),  # other rows
        ROUNDED[:, :3],  # another number of experts
    ],
    ids=["beyond rounding", "other rows", "other width"],
)
def test_other_choices_stay(scores: Tensor) -> None:
    expected = scores.topk(1).indices
    with repeat(keep(SCORES)):
        assert torch.equal(scores.topk(1).indices, expected)


def test_choices_of_another_step_stay() -> None:
    with repeat(keep(SCORES, step=1), step=0):
        assert ROUNDED.topk(1).indices.flatten().tolist() == [0, 0, 0]


def test_masked_numbers_are_no_tie() -> None:
    masked = SCORES.clone()
    masked[:, 2:] = -torch.inf
    golden = keep(masked, 0, torch.topk, 3)
    kept = golden.find(0, Kind.NEAR_TIES, "topk 3 of 4")
    assert kept is not None
    assert kept[:, 1:3].tolist() == [[0.5, 0.502]]


@pytest.mark.parametrize("limit", ["_MOST_VALUES", "_MOST_COMPARED"])
def test_choices_among_too_many_values_stay(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    golden = keep(SCORES)
    monkeypatch.setattr(near_ties, limit, 11)
    with repeat(golden):
        assert ROUNDED.topk(1).indices.flatten().tolist() == [0, 0, 0]


def test_attention_scores_are_no_choices() -> None:
    assert keep(SCORES.reshape(1, 1, 3, 4), 0, torch.max, -1).found == {}


def test_it_applies_to_users_models_in_narrow_precisions() -> None:
    counts = NearTieCounts()
    assert follow_near_ties(make_recipe(), None, counts) is not None
    assert follow_near_ties(make_recipe("float64"), None, counts) is None
    (built_in, *_) = load_cases([ROOT / "cases" / "bf16-ep.yaml"])
    assert built_in.recipe.precision == "bfloat16"
    assert follow_near_ties(built_in.recipe, None, counts) is None
