"""Ranks draw their shards of one parameter under the same seed, so the shards start as copies."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Draw each shard from the start of its parameter's stream."""
    import torch
    from torch.distributed.tensor import DTensor

    from moeverify.cases.schema import ReferenceModel
    from moeverify.faults.catalogue.initialization.streams import fill_run
    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.train.assemble import fill_one

    @patch.wrap(fill_one)
    def restart_shards(
        original: Original[None], spec: ReferenceModel, seed: int, shard: LocalShard, dtype: torch.dtype
    ) -> None:
        fill = fill_run if isinstance(shard.tensor, DTensor) else original
        fill(spec, seed, shard, dtype)


FAULT = Fault(
    number="F05",
    title="the shards of a parameter start as copies",
    source="allenai/OLMo-core PR #307, PR #679 (38704d167)",
    mechanism="the seed of a sharded parameter has no part of the rank in it",
    trigger="parameters sharded over tp or fsdp",
    case=make_case("f05", preset="tiny-gpt", tp=2),
    expected=Expected(
        where=(At(name="embed*"), At(name="*_proj*"), At(name="lm_head*")), causes=(Cause.DUPLICATE,)
    ),
    inject=inject,
    is_moe=False,
)
