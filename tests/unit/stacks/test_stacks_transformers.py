"""Buffers that transformers does not save: a model of a user must compute them when it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moeverify.errors import CaseError
from moeverify.stacks import transformers as stack


class _Rotary(nn.Module):
    def __init__(self, cosines: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("count", torch.tensor(3), persistent=False)


RIGHT = torch.linspace(-1.0, 1.0, 64)


@pytest.mark.parametrize(
    ("loaded", "found"),
    [
        (RIGHT.double(), []),
        (RIGHT.bfloat16(), []),
        (RIGHT[:32], []),  # a shard
        (torch.zeros(64), ["cosines"]),
        (torch.full((64,), torch.nan), ["cosines"]),
        (RIGHT.flip(0), ["cosines"]),
    ],
)
def test_a_buffer_far_from_the_whole_model_is_uninitialized(loaded: torch.Tensor, found: list[str]) -> None:
    assert stack.find_uninitialized(_Rotary(RIGHT), _Rotary(loaded)) == found


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Return a mesh of one rank, this process."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not declare this export
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1, 1, 1), mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp"))
    dist.destroy_process_group()


@pytest.mark.parametrize("initializes", [True, False])
def test_a_loaded_model_whose_buffers_are_uninitialized_is_refused(
    monkeypatch: pytest.MonkeyPatch, mesh: DeviceMesh, initializes: bool
) -> None:
    transformers: Any = pytest.importorskip("transformers", minversion="5.23")

    class Own(transformers.PreTrainedModel):  # type: ignore[misc]  # a class of an untyped package
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.head = nn.Linear(4, 4, bias=False)
            self.register_buffer("cosines", RIGHT.clone(), persistent=False)
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            super()._init_weights(module)
            if initializes and module is self:
                self.cosines.copy_(RIGHT)

    # What the memory had before is seldom the same.
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **named: empty_like(*args, **named).fill_(7))
    model = Own(transformers.PretrainedConfig())
    if initializes:
        assert torch.equal(stack.parallelize(model, mesh).cosines, RIGHT)
        return
    with pytest.raises(CaseError, match="`from_pretrained` of Own leaves buffers uninitialized: `cosines`"):
        stack.parallelize(model, mesh)
