"""The effect of gradient noise on updates, for handwritten gradients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moeverify.cases.schema import CustomModel, Optimizer, Recipe, Tolerance
from moeverify.cases.validation.load import load_cases
from moeverify.parallel.regions.region import Region
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train
from moeverify.verification.checks.bounds import FLOOR, Bounds, Criterion, Norms
from moeverify.verification.golden.noise import noise_key, sign_flip_key, update_drift_key
from moeverify.verification.golden.store import GoldenWriter, StoredGolden
from moeverify.verification.golden_run.update_noise import (
    MAX_SIGN_FLIPS,
    GradientNoise,
    is_adaptive,
    propagate,
    push,
)

CASES = Path(__file__).parents[4] / "cases"
CPU = torch.device("cpu")
LR, EPS, NOISE = 0.01, 1e-8, 0.01
SIZES = {"far": 64, "near": 64, "many": 64, "unused": 64}
TURNING = {"far": 0, "near": 1, "many": 40, "unused": 0}


class Parameters(nn.Module):
    """A module of parameters only."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in SIZES.items():
            setattr(self, name, nn.Parameter(torch.zeros(size)))


def make_recipe(**optimizer: Any) -> Recipe:
    chosen = {"name": "adamw", "lr": LR, "betas": (0.9, 0.95), "eps": EPS, **optimizer}
    model = CustomModel(factory=f"{__name__}:Parameters", vocab_size=8)
    return Recipe(name="hand", model=model, optimizer=Optimizer(**chosen), precision="mixed", steps=2)


def make_gradient(name: str, step: int) -> Tensor:
    """Return values of size 1 and both signs; the first `TURNING` of them lie far below the noise."""
    gradient = torch.where(torch.arange(64) % 3 == 0, -1.0, 1.0).to(torch.float64)
    gradient[: TURNING[name]] *= 1e-4 * (step + 1)
    return torch.zeros(64, dtype=torch.float64) if name == "unused" else gradient


def record(folder: Path, recipe: Recipe) -> None:
    """Record the steps of torch's own optimizer with these gradients in float64."""
    spec = recipe.optimizer
    weights = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
    options: dict[str, Any] = {"lr": spec.lr, "betas": spec.betas, "eps": spec.eps, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(weights.values(), **options)
    whole = Region.whole((64,))
    with GoldenWriter(folder) as writer:
        for step in range(2):
            for name, weight in weights.items():
                weight.grad = make_gradient(name, step)
                writer.observe(step, "gradient", name, weight.grad, whole)
            before = {name: weight.clone() for name, weight in weights.items()}
            optimizer.step()
            for name, weight in weights.items():
                writer.observe(step, "update", name, weight - before[name], whole)
                writer.observe(step, "weight", name, weight, whole)
                for key, value in optimizer.state[weight].items():
                    region = Region.whole(tuple(value.shape))
                    writer.observe(step, "optimizer_state", f"{name}.{key}", value, region)
        writer.finish({}, {})


@pytest.fixture
def golden(tmp_path: Path) -> StoredGolden:
    record(tmp_path / "golden", make_recipe())
    return StoredGolden(tmp_path / "golden")


def show_noise(golden: StoredGolden, size: float = NOISE) -> GradientNoise:
    """Return the record of a run whose gradients are off by `size`, alternating in sign."""
    gradients = GradientNoise(golden)
    error = size * torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)
    for step in range(2):
        for name in SIZES:
            off = 0.0 if name == "unused" else error
            gradients.observe(step, "gradient", name, make_gradient(name, step) + off, Region.whole((64,)))
    return gradients


def bounds_of(golden: StoredGolden, recipe: Recipe, own: float) -> Bounds:
    """Return the bounds after each update was measured to be off by `own`."""
    noise = {noise_key(0, "update", name): own for name in SIZES}
    noise |= propagate(recipe, golden, show_noise(golden), CPU, forced=False)
    return Bounds(Tolerance(), "mixed", noise)


def bound_of(bounds: Bounds, name: str) -> float:
    return bounds.bound((0, "update", name), Criterion(), Norms(1.0, 1.0))


def turned_error(num_turned: int) -> float:
    """Return the error of a tensor of 64 signs after some have turned."""
    return 2.0 * math.sqrt(num_turned / 64)


def test_a_sign_that_no_run_has_turned_is_within_the_bound(golden: StoredGolden) -> None:
    bounds = bounds_of(golden, make_recipe(), own=1e-3)
    assert bound_of(bounds, "near") == pytest.approx(turned_error(1) + 1e-3, rel=1e-3)
    assert bound_of(bounds, "near") > turned_error(1)


def test_the_bound_of_a_tensor_without_an_element_near_zero_is_not_raised(golden: StoredGolden) -> None:
    assert bound_of(bounds_of(golden, make_recipe(), own=1e-3), "far") == pytest.approx(FLOOR["mixed"])
    assert bound_of(bounds_of(golden, make_recipe(), own=0.01), "far") < 8 * 0.01
    assert bound_of(bounds_of(golden, make_recipe(), own=0.01), "unused") < 8 * 0.01


def test_of_many_turning_elements_only_those_are_added_that_a_run_can_miss(golden: StoredGolden) -> None:
    bounds = bounds_of(golden, make_recipe(), own=1e-3)
    assert bound_of(bounds, "many") == pytest.approx(turned_error(MAX_SIGN_FLIPS) + 1e-3, rel=1e-3)


def test_no_more_is_allowed_than_all_elements_that_may_turn(golden: StoredGolden) -> None:
    bounds = bounds_of(golden, make_recipe(), own=0.5)
    assert bound_of(bounds, "many") == pytest.approx(turned_error(40) + 0.5, rel=1e-2)
    assert bound_of(bounds, "near") == pytest.approx(turned_error(1) + 0.5, rel=1e-2)


def second_update(second: float, first: float) -> float:
    """Return Adam's second update by hand, in units of the rate, for a gradient after the first step's."""
    mean = 0.9 * 0.1 * first + 0.1 * second
    square = 0.95 * 0.05 * first**2 + 0.05 * second**2
    return (mean / (1 - 0.9**2)) / (math.sqrt(square / (1 - 0.95**2)) + EPS)


@pytest.mark.parametrize("forced", [False, True])
def test_a_sign_may_turn_in_the_second_step_too(golden: StoredGolden, forced: bool) -> None:
    found = propagate(make_recipe(), golden, show_noise(golden), CPU, forced=forced)
    assert 0.0 < found[update_drift_key(1, "far", forced=forced)] < NOISE
    assert found[sign_flip_key(1, "far", forced=forced)] == 0.0
    first, second, pushed = 1e-4, 2e-4, 8 * NOISE
    right = second_update(second, first)
    turned = [abs(second_update(second - pushed, first) - right)]
    if not forced:  # then the moments may have been off as well
        turned.append(abs(second_update(second - pushed, first - pushed) - right))
    expected = max(turned) / math.sqrt(63 + right**2)
    assert 8 * found[sign_flip_key(1, "near", forced=forced)] == pytest.approx(expected, rel=1e-5)


def test_an_eps_far_above_the_gradients_leaves_nothing_to_turn(tmp_path: Path) -> None:
    recipe = make_recipe(eps=1e3)
    record(tmp_path / "golden", recipe)
    golden = StoredGolden(tmp_path / "golden")
    own = NOISE  # the update is then a multiple of the gradient, and equally off
    bounds = bounds_of(golden, recipe, own)
    for name in ("far", "near"):
        assert 8 * own <= bound_of(bounds, name) * 1.001 < 9.1 * own, name


def test_the_gradients_own_bound_is_as_before(golden: StoredGolden) -> None:
    found = propagate(make_recipe(), golden, show_noise(golden), CPU, forced=False)
    assert {key.split("/")[1] for key in found} == {"update drift", "sign flips", "squares"}


def moment_error(size: float, *, forced: bool) -> float:
    """Return the error of the second step's second moment if each gradient `far` is larger by `size`."""
    decay = 0.95

    def moment(off: float) -> Tensor:
        first, second = (make_gradient("far", step).abs() for step in (0, 1))
        first = first if forced else first + off
        return decay * (1 - decay) * first**2 + (1 - decay) * (second + off) ** 2

    right = moment(0.0)
    return float((moment(size) - right).norm() / right.norm())


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("size", [0.01, 0.5])
def test_a_second_moment_may_be_off_by_the_square_of_all_gradient_noise(
    golden: StoredGolden, size: float, forced: bool
) -> None:
    key, name = (1, "optimizer_state", "far.exp_avg_sq"), "far.exp_avg_sq"
    own = moment_error(size, forced=forced)
    noise = {noise_key(1, "optimizer_state", name, forced=forced): own}
    noise |= propagate(make_recipe(), golden, show_noise(golden, size), CPU, forced=forced)
    bounds = Bounds(Tolerance(), "mixed", noise, forced=forced)
    allowed = bounds.bound(key, Criterion(), Norms(1.0, 1.0))
    assert allowed == pytest.approx(moment_error(8 * size, forced=forced), rel=0.02)
    assert (allowed > 1.5 * 8 * own) == (size == 0.5)


def test_a_first_moment_squares_nothing(golden: StoredGolden) -> None:
    found = propagate(make_recipe(), golden, show_noise(golden), CPU, forced=False)
    names = {key.rpartition("/")[2] for key in found if "/squares/" in key}
    assert names == {f"{name}.exp_avg_sq" for name in ("far", "near", "many")}


def test_each_row_is_pushed_by_its_own_noise_and_a_zero_is_not() -> None:
    gradient = torch.tensor([[1.0, 0.1, -0.1], [1.0, 0.1, 0.0]], dtype=torch.float64)
    rows = torch.tensor([[0.025], [0.0025]], dtype=torch.float64)
    expected = torch.tensor([[0.8, -0.1, 0.1], [0.98, 0.08, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(push(gradient, rows), expected)
    assert push(gradient, None) is gradient


def test_what_is_pushed_to_zero_is_the_gradient_as_the_optimizer_uses_it() -> None:
    gradient = torch.tensor([1.0, 1.0, -1.0, 0.0], dtype=torch.float64)
    used = torch.tensor([0.5, -0.1, 0.1, 0.3], dtype=torch.float64)  # with a weight decay added
    rows = torch.tensor([0.025], dtype=torch.float64)
    expected = torch.tensor([0.8, 1.2, -1.2, 0.0], dtype=torch.float64)
    torch.testing.assert_close(push(gradient, rows, used), expected)


class Weights(nn.Module):
    """One parameter, which starts at one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))


def test_a_decay_that_cancels_a_gradient_may_turn_its_update_and_the_moments_after_it(tmp_path: Path) -> None:
    model = CustomModel(factory=f"{__name__}:Weights", vocab_size=8)
    spec = Optimizer(name="adam", lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=1.0)
    recipe = Recipe(name="hand", model=model, optimizer=spec, precision="mixed", steps=2)
    program = assemble_single(recipe, CPU, compute="float64")
    start = program.shards[0].local().clone()
    weight, whole = start.clone().requires_grad_(), Region.whole((8, 8))
    optimizer = torch.optim.Adam([weight], lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=1.0)
    with GoldenWriter(tmp_path / "golden") as writer:
        for step in range(2):
            before = weight.detach().clone()
            # The first element's gradient is far from zero, but Adam's input for it is not.
            weight.grad = torch.where(torch.arange(64).reshape(8, 8) == 0, 1e-4 - before, 1.0 - before)
            writer.observe(step, "gradient", "weight", weight.grad, whole)
            optimizer.step()
            writer.observe(step, "update", "weight", weight.detach() - before, whole)
            for key, value in optimizer.state[weight].items():
                writer.observe(
                    step, "optimizer_state", f"weight.{key}", value, Region.whole(tuple(value.shape))
                )
        writer.finish({}, {})
    golden = StoredGolden(tmp_path / "golden")
    gradients = GradientNoise(golden)
    for step in range(2):
        right = golden.read(step, "gradient", "weight", whole)
        assert right is not None
        off = NOISE * torch.where(torch.arange(64).reshape(8, 8) % 2 == 0, 1.0, -1.0)
        gradients.observe(step, "gradient", "weight", right + off, whole)
    found = propagate(recipe, golden, gradients, CPU, forced=False)
    assert 8 * found[sign_flip_key(0, "weight", forced=False)] == pytest.approx(turned_error(1), rel=1e-2)
    # The weight has gone the other way: its decay is in the moment of the second step.
    mean = golden.read(1, "optimizer_state", "weight.exp_avg", whole)
    assert mean is not None
    moved = 8 * found[sign_flip_key(1, "weight.exp_avg", forced=False)] * torch.linalg.vector_norm(mean)
    assert float(moved) >= 0.1 * 2 * LR
    assert sign_flip_key(0, "weight.exp_avg", forced=False) not in found


def test_the_largest_noise_of_all_runs_is_kept_row_by_row(tmp_path: Path) -> None:
    gradient, whole = torch.ones(2, 4, dtype=torch.float64), Region.whole((2, 4))
    with GoldenWriter(tmp_path / "golden") as writer:
        writer.observe(0, "gradient", "matrix", gradient, whole)
        writer.observe(0, "update", "matrix", gradient, whole)
        writer.finish({}, {})
    gradients = GradientNoise(StoredGolden(tmp_path / "golden"))
    for sizes in ([0.02, 0.001], [0.03, 0.0], [0.01, 0.002]):
        error = torch.tensor(sizes).unsqueeze(1) * torch.tensor([1.0, -1.0, 0.0, 0.0])
        gradients.observe(0, "gradient", "matrix", gradient + error, whole)
    gradients.observe(0, "update", "matrix", gradient + 1.0, whole)
    rows = gradients.of(0, "matrix")
    assert rows is not None
    expected = torch.tensor([[0.03], [0.002]], dtype=torch.float64) / math.sqrt(2.0)
    torch.testing.assert_close(rows, expected, rtol=1e-6, atol=0.0)
    assert gradients.of(0, "elsewhere") is None


@pytest.mark.parametrize("forced", [False, True])
def test_without_noise_the_optimizer_alone_makes_the_goldens_updates(tmp_path: Path, forced: bool) -> None:
    optimizer = {"name": "sgd", "lr": 1.0, "momentum": 0.9, "clip_norm": 0.2, "weight_decay": 0.1}
    chosen = Optimizer(**{**optimizer, "schedule": "linear"})
    (case,) = load_cases([CASES / "fp32-ep.yaml"])
    recipe = case.recipe.model_copy(update={"optimizer": chosen})
    with GoldenWriter(tmp_path / "golden") as writer:
        train(recipe, assemble_single(recipe, CPU, compute="float64"), writer)
        writer.finish({}, {})
    golden = StoredGolden(tmp_path / "golden")
    found = propagate(recipe, golden, GradientNoise(golden), CPU, forced=forced)
    # Updates, and from the second step on the momentum, to which the decay is added.
    assert len(found) == 2 * (recipe.steps + recipe.steps - 1) * 75
    assert max(found.values()) < 1e-3
    assert max(error for key, error in found.items() if "/update drift/" in key) > 1e-8  # rounding to float32


def test_only_rounding_through_an_optimizer_that_rescales_is_propagated() -> None:
    assert is_adaptive(make_recipe())
    assert not is_adaptive(make_recipe(name="sgd"))
