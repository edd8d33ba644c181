"""Ranks draw their shards of one parameter under the same seed, so the shards begin as copies."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from moeverify.case.schema import ReferenceModel
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.layout.local_shard import LocalShard
from moeverify.model.init import initial_values
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.train import assemble


def inject() -> None:
    """Draw each shard from the start of its parameter's stream."""

    def fill_one(spec: ReferenceModel, seed: int, held: LocalShard, dtype: torch.dtype) -> None:
        if not isinstance(held.tensor, DTensor):
            original(spec, seed, held, dtype)
            return
        local = held.local()
        index = torch.arange(local.numel(), device=local.device)
        values = initial_values(spec, seed, held.name, held.region.shape, index)
        local.copy_(values.to(dtype).to(local.dtype).reshape(local.shape))

    original = assemble.fill_one
    assemble.fill_one = fill_one


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
