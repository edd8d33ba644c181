"""The buffer of the selection bias is not persistent."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_saved_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Omit the buffers from saves and loads."""
    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.train.state import TrainingState

    @patch.wrap(TrainingState.tensors)
    def leave_out_buffers(original: Original[list[LocalShard]], self: TrainingState) -> list[LocalShard]:
        return [shard for shard in original(self) if not shard.name.startswith("buffer/")]


FAULT = Fault(
    number="D08",
    title="the selection bias is not in the checkpoint",
    source="flagos-ai/FlagScale PR #411",
    mechanism="the bias of loss-free balancing is no persistent buffer: neither saved nor loaded",
    trigger="loss-free balancing",
    saver=make_saved_case("d08", dp_shard=2, ep=2),
    case=make_saved_case("d08", dp_shard=2, ep=2),
    expected=Expected(where=(At(name="buffer/*.selection_bias"),), causes=(Cause.NOT_LOADED,)),
    inject=inject,
)
