"""The noise and the own results of a user's model and step on one device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moeverify.cases.schema import Precision, Recipe
from moeverify.cases.validation.load import build_case
from moeverify.results.checks import Kind
from moeverify.train.assemble import assemble_single
from moeverify.verification.checks.registry import choose_checks
from moeverify.verification.golden.noise import PERTURBED_RUNS, WIDEST, noise_key, sign_flip_key
from moeverify.verification.golden.store import StoredGolden
from moeverify.verification.golden_run.golden import list_own_results, make_golden
from moeverify.verification.golden_run.noise import measure_noise
from moeverify.verification.golden_run.rewritten_gradients import RewrittenGradients, list_turns, share_noise
from moeverify.verification.golden_run.update_noise import PUSH

CPU = torch.device("cpu")

PROGRAM = '''
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(3))

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm in self.norms:
            x = x + torch.tanh(x) * norm
        return x @ self.embed.weight.T


class Chooser(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.register_buffer("bias", torch.zeros(2))

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        # 1.0045 and 1.0055. In bfloat16 the numbers next to 1 are 2**-7 apart: 1.0078 and 1.0.
        one = torch.ones(len(x), dtype=x.dtype)
        scores = torch.stack([one + 0.0045, one + 0.0035 + 0.002], dim=1)
        load = torch.bincount(scores.topk(1).indices.flatten(), minlength=2).to(self.bias.dtype)
        with torch.no_grad():
            self.bias.copy_(0.5 * (load.mean() - load).sign())
        return (x @ self.embed.weight.T).unflatten(0, tokens.shape)


def make():
    return Model()


def _backward(model, micro_batches):
    for tokens, targets in micro_batches:
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
    return {"loss": loss.detach()}


def plain(model, optimizer, micro_batches):
    optimizer.zero_grad()
    reported = _backward(model, micro_batches)
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    optimizer.step()
    return reported


def roots(model, optimizer, micro_batches):
    optimizer.zero_grad()
    reported = _backward(model, micro_batches)
    for norm in model.norms:
        norm.grad.copy_(norm.grad.sign() * norm.grad.abs().sqrt())
    optimizer.step()
    return reported


def slow(model, optimizer, micro_batches):
    """Move each weight by a hundredth of the step of the weight at the other end."""
    optimizer.zero_grad()
    reported = _backward(model, micro_batches)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    with torch.no_grad():
        for parameter, old in zip(model.parameters(), before):
            parameter.copy_(old + 0.01 * (parameter - old).flip(-1))
    return reported
'''


@pytest.fixture(autouse=True, scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put the user's model and steps on the path."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_noise.py").write_text(PROGRAM)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


def make_recipe(
    step: str | None, precision: Precision = "bfloat16", optimizer: str = "sgd", factory: str = "make"
) -> Recipe:
    recipe = {
        "name": "r",
        "model": {"factory": f"own_noise:{factory}", "vocab_size": 16},
        "data": {"batch": 4, "seq_len": 4},
        "optimizer": {"name": optimizer, "lr": 0.01},
        "precision": precision,
        "steps": 2,
    } | ({} if step is None else {"step": f"own_noise:{step}"})
    return build_case({"name": "c", "recipe": recipe, "layout": {"dp_replicate": 2}}).recipe


def make(recipe: Recipe, folder: Path) -> StoredGolden:
    make_golden(recipe, folder, CPU)
    return StoredGolden(folder)


@pytest.mark.parametrize(("step", "found"), [("plain", set()), ("roots", {"norms.0", "norms.1", "norms.2"})])
def test_a_gradient_that_is_no_multiple_of_the_sum_of_the_passes_is_rewritten(
    step: str, found: set[str], tmp_path: Path
) -> None:
    recipe = make_recipe(step)
    program = assemble_single(recipe, CPU)
    watch = RewrittenGradients(program)
    measure_noise(recipe, program, make(recipe, tmp_path / "golden"), watches=[watch])
    assert watch.report() == found


def test_tensors_of_one_shape_share_the_largest_noise() -> None:
    names = ["norms.0", "norms.1", "embed.weight"]
    keys = [noise_key(1, Kind.GRADIENT, name) for name in names]
    noise = dict(zip(keys, [0.5, 0.0, 0.1], strict=True))
    shapes = {"norms.0": (8,), "norms.1": (8,), "embed.weight": (16, 8)}
    shared = share_noise(noise, {Kind.GRADIENT: names}, shapes, 2)
    assert [shared[key] for key in keys] == [0.5, 0.5, 0.1]
    assert shared.keys() == set(keys)


class Kept:
    """Gradients of one run, before and after a step takes their signs."""

    def __init__(self, *before: float) -> None:
        first = torch.tensor(before, dtype=torch.float64)
        self.kept = {(0, "w"): (first, first.sign())}


@pytest.mark.parametrize(
    ("other", "error"),
    # The fourth of four elements is smaller than its noise times PUSH in the second row.
    [((1.0, -1.0, 2.0, 0.01), 0.0), ((1.0, -1.0, 2.0, 0.004), 1.0)],
)
def test_elements_of_a_gradient_that_are_smaller_than_its_noise_may_turn(
    other: tuple[float, ...], error: float
) -> None:
    runs: Any = [Kept(1.0, -1.0, 2.0, 0.01), Kept(*other)]
    (found,) = list_turns(runs).values()
    assert found == pytest.approx(error / PUSH)
    assert not list_turns(runs[:1])


def test_a_golden_shares_the_noise_of_gradients_that_the_step_rewrites(tmp_path: Path) -> None:
    noise = make(make_recipe("roots"), tmp_path / "roots").noise
    for kind in (Kind.GRADIENT, Kind.UPDATE):
        assert len({noise[noise_key(1, kind, f"norms.{number}")] for number in range(3)}) == 1
    noise = make(make_recipe("plain"), tmp_path / "plain").noise
    assert len({noise[noise_key(1, Kind.GRADIENT, f"norms.{number}")] for number in range(3)}) == 3


def test_the_flips_of_the_recipes_optimizer_are_none_of_another_update(tmp_path: Path) -> None:
    noise = make(make_recipe("slow", optimizer="adamw"), tmp_path / "slow").noise
    assert sign_flip_key(0, "norms.0") not in noise
    noise = make(make_recipe("plain", optimizer="adamw"), tmp_path / "plain").noise
    assert sign_flip_key(0, "norms.0") in noise


def test_rounding_hides_no_result_of_the_users_own_step() -> None:
    """In bfloat16 a hundredth of a step of a weight near one rounds to zero, as the step of a small rate does."""
    recipe = make_recipe("slow", optimizer="adamw")
    own = list_own_results(recipe, choose_checks(), CPU)
    assert {name for _, kind, name in own if kind == Kind.UPDATE} == {
        "embed.weight",
        "norms.0",
        "norms.1",
        "norms.2",
    }


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_a_buffer_has_the_noise_of_choices_that_a_run_does_not_repeat(
    precision: Precision, tmp_path: Path
) -> None:
    noise = make(make_recipe(None, precision, factory="Chooser"), tmp_path).noise
    key = noise_key(0, Kind.BUFFER, "bias")
    assert (noise[key] >= 1.0) == (precision == "bfloat16")
    widest = noise.get(f"{WIDEST}{key}")
    assert (widest == PERTURBED_RUNS.index("own choices")) == (precision == "bfloat16")
    assert f"{WIDEST}{noise_key(0, Kind.GRADIENT, 'embed.weight')}" in noise
