"""Gradient norms that are other sums of powers, told from the gradients of the run itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from wrong_tensors import draw

from moeverify.diagnose.norm_powers import find_powers
from moeverify.results.factor import Source
from moeverify.results.facts import ClipFacts
from moeverify.results.norm_powers import NormOfPowers

GRADIENTS = {
    f"layers.{layer}.{name}": draw(*shape, seed=10 * layer + seed) * (1.0 + layer) * 0.1
    for layer in range(3)
    for seed, (name, shape) in enumerate(
        {"mlp.up.weight": (8, 4), "mlp.up.bias": (8,), "norm.weight": (4,), "mlp.down.weight": (4, 8)}.items()
    )
} | {"embed.weight": draw(16, 4, seed=77) * 0.1, "head.weight": draw(16, 4, seed=78) * 0.2}
SOURCES = [
    Source(name="dp_shard", size=2),
    Source(name="micro-batches", size=4),
    Source(name="ranks", size=2),
]
ALL = torch.cat([each.flatten() for each in GRADIENTS.values()])
LAYERS = [
    torch.cat([each.flatten() for name, each in GRADIENTS.items() if name.startswith(f"layers.{layer}.")])
    for layer in range(3)
] + [torch.cat([GRADIENTS["embed.weight"].flatten(), GRADIENTS["head.weight"].flatten()])]


def find(norm: float, *, noise: float = 1e-6) -> NormOfPowers | None:
    sizes = {
        name: (float(each.abs().sum()), float(each.abs().max()), each.numel())
        for name, each in GRADIENTS.items()
    }
    squares = {name: float(each.square().sum()) for name, each in GRADIENTS.items()}
    return find_powers(
        norm, ClipFacts(norms=(norm, norm), squares=squares, sizes=sizes), SOURCES, noise=noise
    )


def norms(groups: Sequence[Tensor] = tuple(GRADIENTS.values())) -> Tensor:
    return torch.stack([each.norm() for each in groups])


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (lambda: norms().pow(4).sum().sqrt(), ("parameter", "norm", 4.0, 2.0, False)),
        (lambda: norms().mean(), ("parameter", "norm", 1.0, 1.0, True)),
        (lambda: norms().square().mean().sqrt(), ("parameter", "norm", 2.0, 2.0, True)),
        (lambda: norms(LAYERS).sum(), ("layer", "norm", 1.0, 1.0, False)),
        (lambda: norms(LAYERS).mean(), ("layer", "norm", 1.0, 1.0, True)),
        (lambda: norms(LAYERS).pow(4).sum().sqrt(), ("layer", "norm", 4.0, 2.0, False)),
        (lambda: ALL.norm() ** 4, ("all", "norm", 1.0, 0.25, False)),
        (lambda: ALL.square().mean(), ("all", "mean-square", 1.0, 0.5, False)),
        (
            lambda: torch.stack([each.abs().max() for each in GRADIENTS.values()]).square().sum().sqrt(),
            ("parameter", "largest", 2.0, 2.0, False),
        ),
        (
            lambda: torch.stack([each.abs().sum() for each in GRADIENTS.values()]).square().sum().sqrt(),
            ("parameter", "absolute", 2.0, 2.0, False),
        ),
        (
            lambda: torch.stack([each.square().mean() for each in GRADIENTS.values()]).sum().sqrt(),
            ("parameter", "mean-square", 2.0, 2.0, False),
        ),
    ],
)
def test_the_powers_of_a_norm_are_named(
    value: Callable[[], Tensor], told: tuple[str, str, float, float, bool]
) -> None:
    found = find(float(value()))
    assert found is not None
    assert (found.part, found.number, found.power, found.root, found.is_mean) == told
    assert found.factor is None


@pytest.mark.parametrize(("times", "sources"), [(2.0, {"dp_shard", "ranks"}), (0.25, {"micro-batches"})])
def test_a_norm_before_an_average_is_so_many_times_the_right_one(times: float, sources: set[str]) -> None:
    found = find(times * float(ALL.norm()))
    assert found is not None
    assert found.factor is not None
    assert (found.part, found.number) == ("all", "norm")
    assert set(found.factor.sources) == sources


def test_the_right_norm_and_one_that_nothing_gives_are_none() -> None:
    right = float(ALL.norm())
    assert find(right) is None
    assert find(right * (1.0 + 1e-9)) is None
    assert find(math.nan) is None


def test_norms_that_are_drawn_by_lot_are_hardly_ever_named() -> None:
    generator = torch.Generator().manual_seed(0)
    factors = torch.rand(200, generator=generator, dtype=torch.float64).mul(4.0).sub(2.0).exp().tolist()
    assert sum(find(factor * float(ALL.norm())) is not None for factor in factors) <= 1


def test_of_a_norm_that_is_known_to_few_digits_nothing_is_said() -> None:
    assert find(float(norms().mean()), noise=1e-3) is None
