"""Random states are stored without the rank."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_saved_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Save the states of rank 0 for all ranks."""
    import torch.distributed as dist
    from torch import Tensor

    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.tools.checkpoint import save
    from moeverify.tools.checkpoint.writer import Part

    @patch.wrap(save.list_parts, used_by=save)
    def share_generators(
        original: Original[tuple[list[Part], dict[str, Tensor]]], tensors: Sequence[LocalShard]
    ) -> tuple[list[Part], dict[str, Tensor]]:
        parts, state = original(tensors)
        for number, part in enumerate(parts):
            if part.key.startswith("rng/"):
                shared = state[str(number)].clone()
                dist.broadcast(shared, src=0)
                state[str(number)] = shared
        return parts, state


FAULT = Fault(
    number="F09",
    title="every rank gets the random state of rank 0",
    source="NVIDIA-NeMo/Automodel PR #3437 (835c900ba)",
    mechanism="the file of the random states has a name without the rank",
    trigger="anything random: dropout, jitter",
    saver=make_saved_case("f09", dp_replicate=2, data_parallel="ddp"),
    case=make_saved_case("f09", dp_replicate=2, data_parallel="ddp"),
    expected=Expected(where=(At(name="rng/*"),), causes=(Cause.DUPLICATE,)),
    inject=inject,
    is_moe=False,
    notes="status of the report: title only",
)
