"""The gathered weights of one group are not refreshed from the shards that the optimizer has changed."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.model.transformer import Transformer
from moeverify.parallel import fsdp2
from moeverify.parallel.ddp import Accumulate
from moeverify.parallel.fsdp2 import apply_fsdp2
from moeverify.results.cause import Cause

STALE_LAYER = "1"


def inject() -> None:
    """Keep the gathered weights of one block from the first forward pass on."""
    fsdp2.apply_fsdp2 = _apply_fsdp2


def _apply_fsdp2(model: Transformer, *rest: Any) -> Accumulate:
    accumulate = apply_fsdp2(model, *rest)
    block = model.layers[STALE_LAYER]
    assert isinstance(block, FSDPModule)
    block.set_reshard_after_forward(False, recurse=False)
    block.set_reshard_after_backward(False, recurse=False)
    return accumulate


FAULT = Fault(
    number="N02",
    title="weights to compute with are stale after the optimizer step",
    source="NVIDIA/Megatron-LM PR #6336 (1d402ad6e2)",
    mechanism="some groups' copy for computation is never refreshed from the weights that were updated",
    trigger="FSDP with a copy of the weights for computation, from the second step on",
    case=make_case("n02", dp_shard=2),
    expected=Expected(where=r"layers\.1\b", causes=(Cause.STALE,)),
    inject=inject,
    is_moe=False,
    notes="upstream the copy is a low-precision one; here it is what FSDP2 gathers from the shards",
)
