"""The gathered weights of one group are not refreshed from the updated shards."""

from __future__ import annotations

from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

STALE_LAYER = "1"


def inject(patch: Patch) -> None:
    """Keep the gathered weights of one block after the first forward pass."""
    from torch.distributed.fsdp import FSDPModule

    from moeverify.model.transformer import Transformer
    from moeverify.parallel.ddp import Accumulate
    from moeverify.parallel.fsdp2 import apply_fsdp2

    @patch.wrap(apply_fsdp2)
    def keep_gathered(
        original: Original[Accumulate], model: Transformer, *args: Any, **named: Any
    ) -> Accumulate:
        accumulate = original(model, *args, **named)
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
    expected=Expected(where=(At(name="layers.1.*"), At(name="layers.1")), causes=(Cause.STALE,)),
    inject=inject,
    is_moe=False,
    notes="upstream the copy is a low-precision one; here it is what FSDP2 gathers from the shards",
)
