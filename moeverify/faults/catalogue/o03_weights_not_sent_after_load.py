"""What one rank has loaded never reaches the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from moeverify.checkpoint import load
from moeverify.checkpoint.writer import Part
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_saved_case
from moeverify.layout.local_shard import LocalShard
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject() -> None:
    """Load on each rank every second weight only."""

    def list_parts(tensors: Sequence[LocalShard]) -> tuple[list[Part], dict[str, Tensor]]:
        parts, state = original(tensors)
        for number, part in enumerate(parts):
            if part.key.startswith("weight/") and number % dist.get_world_size() != dist.get_rank():
                state[str(number)] = state[str(number)].clone()
        return parts, state

    original = load.list_parts
    load.list_parts = list_parts


FAULT = Fault(
    number="O03",
    title="weights are not sent to the other ranks after a load",
    source="NVIDIA/Megatron-LM PR #6920",
    mechanism=(
        "each rank loads the parameters that it owns, and the loop that sends them to the others runs "
        "over an empty list"
    ),
    trigger="an optimizer whose parameters are shared out by layer",
    saver=make_saved_case("o03", dp_replicate=2, data_parallel="ddp"),
    case=make_saved_case("o03", dp_replicate=2, data_parallel="ddp"),
    expected=Expected(where=(At(name="weight/*"),), causes=(Cause.NOT_LOADED,)),
    inject=inject,
    is_moe=False,
)
