"""Properties of a parameter that expert parallelism preserves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moeverify.parallel.expert import _shard_parameters


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    dist.destroy_process_group()


def test_a_frozen_parameter_stays_frozen(mesh: DeviceMesh) -> None:
    experts = nn.Module()
    for name, trains in (("up", True), ("down", False)):
        experts.register_parameter(name, nn.Parameter(torch.zeros(2, 4, 4), requires_grad=trains))
    _shard_parameters(experts, mesh)  # type: ignore[arg-type]
    assert {name: parameter.requires_grad for name, parameter in experts.named_parameters()} == {
        "up": True,
        "down": False,
    }
