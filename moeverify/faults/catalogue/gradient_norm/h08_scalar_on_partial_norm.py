"""A constant added to a partial sum is counted once per rank."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage


def inject(patch: Patch) -> None:
    """Add the small constant that guards the division once per rank."""
    import torch.distributed as dist
    from torch import Tensor

    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.train.clipping import clip_gradients

    @patch.wrap(clip_gradients)
    def add_on_every_rank(
        original: Original[Tensor], shards: Sequence[LocalShard], norm: Tensor, max_norm: float
    ) -> Tensor:
        return original(shards, norm + (dist.get_world_size() - 1) * 1e-6, max_norm)


FAULT = Fault(
    number="H08",
    title="the guard of the clip's division is added once a rank",
    source="pytorch/pytorch issues #149768, #163193",
    mechanism="DTensor adds a Python number to the local part of a partial sum on every rank",
    trigger="a clip of DTensors",
    case=make_case("h08", preset="tiny-gpt", dp_shard=2),
    expected=Expected(where=(At(stage=Stage.GRADIENT_NORM), At(stage=Stage.CLIP)), causes=(Cause.NORM,)),
    inject=inject,
    is_moe=False,
)
