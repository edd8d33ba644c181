"""Launches of checks in a step: independent of the number of tensors, with unchanged results per tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from moeverify.cases.schema import Optimizer
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.region import Region
from moeverify.train.optimizer_kinds import OPTIMIZER
from moeverify.verification.checks import recomputed_step
from moeverify.verification.checks.gathered_weights import GatheredWatch
from moeverify.verification.checks.recomputed_step import RecomputedTensor, Sampled, read_batch, recompute
from moeverify.verification.checks.sampling import sample_all

Group = tuple[Sequence[Sampled], float]


class Launches(TorchDispatchMode):
    """A counter of operators that launch on a GPU: all except views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = (
            each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns
        )
        self.count += not any(views) and "empty" not in func._schema.name
        return func(*args, **(kwargs or {}))


def count(work: Callable[[], object]) -> int:
    with Launches() as launches:
        work()
    return launches.count


def make_group(num_shards: int, weight_decay: float, seed: int, dtype: torch.dtype = torch.bfloat16) -> Group:
    generator = torch.Generator().manual_seed(seed)

    def draw(size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype).double()

    members = []
    for number in range(num_shards):
        size = 5 + number % 7
        shard = LocalShard(f"{seed}.{number}", torch.empty(size), Region.whole((size,)))
        moments = [{"exp_avg": draw(size), "exp_avg_sq": draw(size).square()} for _ in range(2)]
        drawn = draw(size), draw(size), 0.01 * draw(size)
        members.append(Sampled(shard, 1, *drawn, *moments, dtypes={dtype}, rate=0.1, number=4))
    return members, weight_decay


def run(groups: Sequence[Group], name: str = "adamw") -> list[RecomputedTensor]:
    spec = Optimizer.model_construct(betas=(0.9, 0.95), eps=1e-8, momentum=0.9)
    kind = OPTIMIZER.find(name)
    batches = recompute(kind, spec, groups, step=3, lr=0.1, clip=torch.tensor(0.5).double())
    return [row for batch in list(batches) for row in read_batch(batch)]


def count_recomputed(groups: Sequence[Group]) -> int:
    spec = Optimizer.model_construct(betas=(0.9, 0.95), eps=1e-8)
    run(groups)  # element positions are computed once
    kind = OPTIMIZER.find("adamw")
    return count(lambda: list(recompute(kind, spec, groups, step=3, lr=0.1)))


def test_twice_as_many_tensors_are_recomputed_in_as_many_launches() -> None:
    few, many = ([make_group(size, 0.1, 1), make_group(size, 0.0, 2)] for size in (4, 8))
    assert count_recomputed(few) == count_recomputed(many)


def test_results_of_another_group_are_measured_with_the_others() -> None:
    one = [make_group(4, 0.1, 1)]
    both = [*one, make_group(4, 0.0, 2)]
    assert count_recomputed(both) < 1.6 * count_recomputed(one)


@pytest.mark.parametrize("most", [1, 30, 1 << 21])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_what_is_measured_together_is_as_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, most: int
) -> None:
    groups = [make_group(4, 0.1, 1, dtype), make_group(3, 0.0, 2, dtype), make_group(5, 0.2, 3, dtype)]
    alone = [row for group in groups for row in run([group], name)]
    monkeypatch.setattr(recomputed_step, "_TOGETHER", most)
    assert repr(run(groups, name)) == repr(alone)


def test_samples_of_more_tensors_take_as_many_launches() -> None:
    few, many = ([(torch.ones(9, dtype=torch.bfloat16), 2)] * size for size in (5, 10))
    assert count(lambda: sample_all(few)) == count(lambda: sample_all(many)) > 0


@pytest.fixture(scope="module")
def shard() -> Iterator[Callable[[int], FSDPModule]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))

    def do(num_layers: int) -> FSDPModule:
        return fully_shard(nn.Sequential(*(nn.Linear(16, 16) for _ in range(num_layers))), mesh=mesh)

    yield do
    dist.destroy_process_group()


def test_stored_weights_of_more_layers_are_sampled_in_as_many_launches(
    shard: Callable[[int], FSDPModule],
) -> None:
    few, many = (GatheredWatch(shard(size)) for size in (2, 4))
    assert count(lambda: few.begin_step(0)) == count(lambda: many.begin_step(0)) == 1


def test_what_a_module_uses_is_copied_with_what_is_stored(shard: Callable[[int], FSDPModule]) -> None:
    model = shard(2)
    watch = GatheredWatch(model)
    watch.begin_step(0)
    model.unshard()
    watch._look(model[0], ())  # the element positions are computed once
    watch.begin_step(1)
    # Weight and bias, each in its compute and in its stored form.
    assert count(lambda: watch._look(model[0], ())) == 1
    watch.close()
    assert watch.report().names == ("0.bias", "0.weight")
