"""The recomputed update: no finding for torch's own optimizers in any precision, one for a wrong update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from moeverify.parallel.regions.local_shard import parameters
from moeverify.results.finding import Finding
from moeverify.results.step_facts import RecomputedFacts
from moeverify.scripts.guard.update import UpdateWatch


def train(make: Any, dtype: torch.dtype = torch.float32, steps: int = 20, **options: Any) -> list[Finding]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 20)).to(dtype)
    optimizer: Optimizer = make(model.parameters(), **options)
    findings = []
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randint(20, (8,))).float().square().mean().backward()
        watch = UpdateWatch(optimizer, parameters(model))
        optimizer.step()
        findings += watch.finish(step, 0)
    return findings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
        (AdamW, {"lr": torch.tensor(1e-3), "foreach": False}),
        (AdamW, {"lr": 1e-2, "fused": True}),
        (Adam, {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}),
        (Adam, {"lr": 1e-2, "amsgrad": True}),
        (Adam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
        (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (SGD, {"lr": 0.1}),
    ],
)
def test_torchs_own_optimizers_are_silent(make: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    assert not train(make, dtype, **options)


def test_a_wrong_weight_decay_and_a_wrong_moment_are_named() -> None:
    class Decays(AdamW):
        """An optimizer that decays twice as much as its option says."""

        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                for group in self.param_groups:
                    for each in group["params"]:
                        each.mul_(1 - group["lr"] * group["weight_decay"])
            super().step()

    Decays.__name__ = "AdamW"
    findings = train(Decays, steps=3, lr=1e-2, weight_decay=0.5)
    assert findings
    facts = findings[0].facts
    assert isinstance(facts, RecomputedFacts)
    assert [term.name for term in facts.wrong_terms] == ["weight decay"]

    class Forgets(SGD):
        """An optimizer that loses its momentum."""

        def step(self, closure: Any = None) -> None:
            for state in self.state.values():
                state["momentum_buffer"].zero_()
            super().step()

    Forgets.__name__ = "SGD"
    findings = train(Forgets, steps=3, lr=0.1, momentum=0.9)
    assert findings
    assert {finding.tensor.rpartition(".")[2] for finding in findings} == {"momentum_buffer"}


def test_an_optimizer_of_another_name_is_left_alone() -> None:
    class Signs(SGD):
        """An optimizer that moves by signs."""

        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                for group in self.param_groups:
                    for each in group["params"]:
                        each.sub_(group["lr"] * each.grad.sign())

    assert not train(Signs, steps=2, lr=0.1)


@pytest.mark.parametrize(("placement", "num_unjudged"), [(Replicate(), 1), (Shard(0), 0)])
def test_a_gradient_of_another_placement_is_not_judged(placement: Placement, num_unjudged: int) -> None:
    """An embedding that torch divides by rows gets a whole gradient."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Linear(8, 8, bias=False)
        model.weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]))
        optimizer = AdamW(model.parameters(), lr=0.1)
        rows = 8 if isinstance(placement, Replicate) else 4
        model.weight.grad = DTensor.from_local(torch.ones(rows, 8), mesh, [placement])
        watch = UpdateWatch(optimizer, list(parameters(model)))
        optimizer.step()
        assert not watch.finish(0, 0)
        assert len(watch.list_unjudged()) == num_unjudged
    finally:
        dist.destroy_process_group()
