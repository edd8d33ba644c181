"""The loop gets gradients and steps from an engine: a framework needs no change of the loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer as TorchOptimizer

from moeverify.cases.schema import Optimizer, Recipe
from moeverify.faults.setting import make_case
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.region import Region
from moeverify.tools.bench.measure import take_step
from moeverify.train.assemble import assemble_single
from moeverify.train.clipping import gradient_norm
from moeverify.train.engine import Engine, PlainEngine
from moeverify.train.loop import make_batches, train
from moeverify.train.state import TrainingState

CPU = torch.device("cpu")


class FlatEngine(PlainEngine):
    """An engine with gradients in one flat buffer, as Megatron-LM's `main_grad`; the loop sees no `.grad`."""

    def begin(self, spec: Optimizer, shards: Sequence[LocalShard], kernels: str) -> TorchOptimizer:
        sizes = [shard.tensor.numel() for shard in shards]
        self.buffer = torch.zeros(sum(sizes), dtype=torch.float64)
        self.views = {
            id(shard.tensor): part.view_as(shard.tensor)
            for shard, part in zip(shards, self.buffer.split(sizes), strict=True)
        }
        self.shards = shards
        self.calls: list[str] = []
        return super().begin(spec, shards, kernels)

    def zero_grad(self) -> None:
        self.calls.append("zero_grad")
        self.buffer.zero_()

    def backward(self, loss: Tensor) -> None:
        self.calls.append("backward")
        super().backward(loss)
        for shard in self.shards:
            if shard.tensor.grad is not None:
                self.views[id(shard.tensor)] += shard.tensor.grad
                shard.tensor.grad = None

    def gradient(self, shard: LocalShard) -> Tensor | None:
        return self.views[id(shard.tensor)]

    def norm(self) -> Tensor | None:
        self.calls.append("norm")
        return self.buffer.norm()

    def clip(self, shards: Sequence[LocalShard], norm: Tensor, max_norm: float) -> Tensor:
        self.calls.append("clip")
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self.buffer.mul_(coefficient)
        return coefficient

    def step(self) -> None:
        self.calls.append("step")
        for shard in self.shards:
            shard.tensor.grad = self.views[id(shard.tensor)].clone()
        super().step()
        for shard in self.shards:
            shard.tensor.grad = None


class Record:
    """An observer that keeps everything."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[int, str, str], Tensor | None] = {}

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        self.tensors[step, kind, name] = None if local is None else local.detach().clone()

    def begin_step(self, step: int) -> None:
        pass


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return make_case("engine", optimizer="adamw", model={"num_layers": 1}, data={"batch": 4}).recipe


def record(recipe: Recipe, engine: Engine) -> dict[tuple[int, str, str], Tensor | None]:
    program = assemble_single(recipe, CPU)
    program.num_micro_batches = 2
    program.engine = engine
    observer = Record()
    train(recipe, program, observer)
    return observer.tensors


def test_gradients_of_an_engine_are_compared_wherever_it_keeps_them(recipe: Recipe) -> None:
    engine = FlatEngine()
    expected, actual = record(recipe, PlainEngine()), record(recipe, engine)
    assert actual.keys() == expected.keys()
    for key, wanted in expected.items():
        found = actual[key]
        assert wanted is not None
        assert found is not None, key
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13, msg=str(key))
    one_step = ["zero_grad", "backward", "backward", "norm", "clip", "step"]
    assert engine.calls == one_step * recipe.steps


def test_a_step_with_nobody_watching_goes_by_the_engine_too(recipe: Recipe) -> None:
    engine = FlatEngine()
    program = assemble_single(recipe, CPU)
    program.engine = engine
    engine.begin(recipe.optimizer, program.shards, "foreach")
    before = [shard.local().clone() for shard in program.shards]
    take_step(recipe, program, make_batches(recipe, program, 0))
    assert engine.calls == ["zero_grad", "backward", "norm", "clip", "step"]
    assert any(not torch.equal(old, shard.local()) for old, shard in zip(before, program.shards, strict=True))


def test_a_missing_gradient_is_none_and_not_zero(recipe: Recipe) -> None:
    program = assemble_single(recipe, CPU)
    TrainingState.begin(recipe, program)
    program.engine.zero_grad()
    assert [program.engine.gradient(shard) for shard in program.shards[:2]] == [None, None]


def test_plain_torch_leaves_the_norm_to_the_loop(recipe: Recipe) -> None:
    program = assemble_single(recipe, CPU)
    TrainingState.begin(recipe, program)
    for shard in program.shards:
        shard.tensor.grad = torch.ones_like(shard.tensor)
    assert program.engine.norm() is None
    total = sum(shard.tensor.numel() for shard in program.shards)
    torch.testing.assert_close(gradient_norm(program.shards), torch.tensor(float(total)).double().sqrt())
    coefficient = program.engine.clip(program.shards, torch.tensor(4.0).double(), 1.0)
    assert coefficient.item() == pytest.approx(0.25)
    gradients: Iterator[Tensor | None] = (program.engine.gradient(shard) for shard in program.shards)
    assert all(gradient is not None and torch.all(gradient == coefficient) for gradient in gradients)
