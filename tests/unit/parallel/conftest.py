"""Ranks of any layout in turn in this process, on torch's fake process group, which moves no data.

A rank's stored tensors, groups and remaining reductions depend only on its position, so they can be queried
without other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from moeverify.cases.schema import Case, ReferenceModel
from moeverify.faults.setting import make_case
from moeverify.model.transformer import Transformer
from moeverify.parallel.meshes import Meshes, build_meshes
from moeverify.parallel.pipeline import build_stages
from moeverify.parallel.plan import Parallelized, parallelize, parallelize_stages
from moeverify.train.assemble import shapes_of

CPU = torch.device("cpu")


@contextmanager
def be_rank(rank: int, world_size: int) -> Iterator[None]:
    """Act as one rank of a world without other ranks."""
    # torch caches results per mesh for equal meshes, even if this process was another rank before.
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class RankModel:
    """The reference model of a case on one rank."""

    case: Case
    meshes: Meshes
    done: Parallelized


@contextmanager
def parallelize_on(case: Case, rank: int) -> Iterator[RankModel]:
    """Yield the model of a case as one of its ranks stores it, with zeros for values."""
    layout, spec = case.layout, case.recipe.model
    assert isinstance(spec, ReferenceModel)

    def fill(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()

    with be_rank(rank, layout.world_size):
        meshes = build_meshes(layout, "cpu")
        if layout.pp == 1:
            model = Transformer(spec, experts=layout.experts, device="meta")
            yield RankModel(case, meshes, parallelize(model, layout, meshes, CPU, fill))
        else:
            stages = build_stages(
                spec, layout, meshes.coordinate("pp"), experts=layout.experts, dtype=torch.float64
            )
            shapes = shapes_of(case.recipe, layout)
            yield RankModel(case, meshes, parallelize_stages(stages, shapes, layout, meshes, CPU, fill))


@pytest.fixture
def as_rank() -> Callable[[Case, int], Any]:
    """Return the context manager that gives a case's model on a rank."""
    return parallelize_on


@pytest.fixture
def make() -> Callable[..., Case]:
    """Return a function that makes a case of these degrees."""
    return lambda **layout: make_case("here", **layout)
