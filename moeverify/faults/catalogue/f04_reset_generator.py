"""The random state is put back after each initialization, so all shards and all layers draw the same numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from moeverify.case.schema import ReferenceModel
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.layout.local_shard import LocalShard
from moeverify.model import init
from moeverify.model.init import initial_values
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage
from moeverify.train import assemble


def inject() -> None:
    """Let every tensor and every shard draw from the beginning of one stream."""

    def restart(seed: int, name: str, flat_index: Tensor) -> Tensor:
        return draw(seed, "", flat_index)

    def fill_one(spec: ReferenceModel, seed: int, held: LocalShard, dtype: torch.dtype) -> None:
        local = held.local()
        index = torch.arange(local.numel(), device=local.device)
        values = initial_values(spec, seed, held.name, held.region.shape, index)
        local.copy_(values.to(dtype).to(local.dtype).reshape(local.shape))

    draw = init.draw
    init.draw = restart
    assemble.fill_one = fill_one


FAULT = Fault(
    number="F04",
    title="shards and layers of one shape start as copies",
    source="pytorch/torchtitan #3106",
    mechanism="each random operation on a DTensor forks and restores the CPU's random state, so all begin alike",
    trigger="FSDP2 with parameters on the CPU",
    case=make_case("f04", preset="tiny-gpt", dp_shard=2),
    expected=Expected(where=(At(stage=Stage.INITIALIZATION),), causes=(Cause.DUPLICATE,)),
    inject=inject,
    is_moe=False,
    notes="every parameter is at fault, so every place is right",
)
