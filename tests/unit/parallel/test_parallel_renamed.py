"""DTensors that `parallelize` renames, or whose names refer to another parameter on each rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from moeverify.parallel.regions.region import Region
from moeverify.train.parallelize_custom import ParallelizedCustomModel


def draw_whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = ("up.weight", "down.weight", "experts.0.weight", "experts.1.weight")
    return {name: torch.randn(6, 4, generator=generator) for name in names}


def list_shards(rank: int, renamed: dict[str, str], **declared: object) -> list[tuple[str, Region]]:
    """Return the shards of rank `rank` of 2 for renamed DTensors, (own name: parameter), divided by rows."""
    whole = draw_whole()
    _clear_sharding_prop_cache()  # torch keeps its results for equal meshes of another rank
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Module()
        for own, name in renamed.items():
            *modules, last = own.split(".")
            module = model
            for each in modules:
                if not hasattr(module, each):
                    module.add_module(each, nn.Module())
                module = module.get_submodule(each)
            local = whole[name].chunk(2)[rank].clone()
            divided = DTensor.from_local(local, mesh, [Shard(0)], shape=whole[name].shape, stride=(4, 1))
            module.register_parameter(last, nn.Parameter(divided))
        shards = ParallelizedCustomModel(model, **declared).list_shards(whole)  # type: ignore[arg-type]
        for shard in shards:
            assert torch.equal(shard.local(), shard.region.take(whole[shard.name]))
    finally:
        dist.destroy_process_group()
    return [(shard.name, shard.region) for shard in shards]


@pytest.mark.parametrize("rank", [0, 1])
def test_renamed_dtensors_are_found_by_their_values(rank: int) -> None:
    rows = Region.box((6, 4), [range(3 * rank, 3 * rank + 3), range(4)])
    found = list_shards(rank, {"up.grid": "up.weight", "stored.a": "down.weight"})
    assert found == [("up.weight", rows), ("down.weight", rows)]


@pytest.mark.parametrize("rank", [0, 1])
def test_declared_names_of_dtensors_are_believed(rank: int) -> None:
    rows = Region.box((6, 4), [range(3 * rank, 3 * rank + 3), range(4)])
    found = list_shards(rank, {"grid": "down.weight"}, names={"grid": "down.weight"})
    assert found == [("down.weight", rows)]
    found = list_shards(rank, {"grid": "down.weight"}, names={"grid": "down.weight"}, regions={"grid": rows})
    assert found == [("down.weight", rows)]


@pytest.mark.parametrize("rank", [0, 1])
def test_numbers_of_dtensors_that_mean_another_parameter(rank: int) -> None:
    renamed = {"experts.0.weight": "experts.1.weight"}
    assert [name for name, _ in list_shards(rank, renamed, numbers_locally=True)] == ["experts.1.weight"]
