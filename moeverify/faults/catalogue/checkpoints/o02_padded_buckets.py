"""Offsets include padding that is not in the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_saved_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

_BUCKET, _ALIGNMENT = 8192, 64  # elements


def inject(patch: Patch) -> None:
    """Read each moment of a rank's flat shards too far along, by the padding of the buckets before it."""
    import torch
    from torch import Tensor

    from moeverify.train.state import TrainingState

    def read_shifted(moments: Sequence[Tensor]) -> None:
        file = torch.cat(list(moments))
        place = filled = padding = 0
        for moment in moments:
            found = file[place + padding : place + padding + moment.numel()]
            moment.zero_()
            moment[: found.numel()] = found
            place += moment.numel()
            filled += moment.numel()
            if filled > _BUCKET:
                padding += -filled % _ALIGNMENT
                filled = 0

    @patch.wrap(TrainingState.restore)
    def restore_shifted(original: Original[None], self: TrainingState, facts: Mapping[str, Any]) -> None:
        original(self, facts)
        for key in ("exp_avg", "exp_avg_sq"):
            read_shifted([self.optimizer.state[shard.tensor][key].view(-1) for shard in self.program.shards])


FAULT = Fault(
    number="O02",
    title="moments are read shifted after the first bucket",
    source="NVIDIA/Megatron-LM PR #5077 (32a03b77c5)",
    mechanism=(
        "the padding at the end of a bucket is left out of the file and counted in the offsets: what "
        "comes after it is read too far along, and the end is filled up with zeros"
    ),
    trigger="flat shards in more than one bucket",
    saver=make_saved_case("o02", dp_shard=2, data_parallel="fsdp1"),
    case=make_saved_case("o02", dp_shard=2, data_parallel="fsdp1"),
    expected=Expected(where=(At(name="optimizer/*"),), causes=(Cause.PERMUTATION,)),
    inject=inject,
    is_moe=False,
)
