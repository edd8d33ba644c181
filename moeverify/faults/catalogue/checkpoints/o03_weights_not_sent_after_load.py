"""Weights that one rank loaded are never sent to the others."""

from __future__ import annotations

from moeverify.faults.catalogue.checkpoints.unloaded import load_into_copies
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_saved_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Load only every n-th weight on each of n ranks."""
    import torch.distributed as dist

    load_into_copies(
        patch,
        lambda number, part: (
            part.key.startswith("weight/") and number % dist.get_world_size() != dist.get_rank()
        ),
    )


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
