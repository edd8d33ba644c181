"""A reordering for tensor parallelism is applied under data parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_saved_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Reorder the rows of dense gates after the load."""
    import torch

    from moeverify.train.state import TrainingState

    @patch.wrap(TrainingState.restore)
    def reorder_gates(original: Original[None], self: TrainingState, facts: Mapping[str, Any]) -> None:
        original(self, facts)
        for shard in self.program.shards:
            if shard.name.endswith("mlp.gate_proj.weight"):
                local = shard.local()
                local.copy_(torch.cat([local[0::2], local[1::2]]))


FAULT = Fault(
    number="O10",
    title="the halves of a gate are interleaved after a load",
    source="NVIDIA/Megatron-LM issue #2769, PR #5714",
    mechanism=(
        "the load puts a fused gate into the order that tensor-parallel ranks need, on a weight that "
        "is sharded over the data ranks"
    ),
    trigger="FSDP2, gated units",
    saver=make_saved_case("o10", dp_shard=2),
    case=make_saved_case("o10", dp_shard=2),
    expected=Expected(where=(At(name="weight/*.gate_proj*"),), causes=(Cause.PERMUTATION,)),
    inject=inject,
    is_moe=False,
)
