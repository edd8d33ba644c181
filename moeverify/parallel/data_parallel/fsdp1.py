"""FullyShardedDataParallel: each block's parameters are one flat parameter, cut into runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from moeverify.cases.rule import blame, reading
from moeverify.cases.schema import Case
from moeverify.errors import Problem
from moeverify.parallel.data_parallel import DataParallelKind, DataRanks

if TYPE_CHECKING:
    import torch
    from torch import nn

    from moeverify.model.transformer import Transformer
    from moeverify.parallel.ddp import Accumulate


@reading(
    *(f"layout.{name}" for name in ("data_parallel", "dp_replicate", "dp_shard")),
    *(f"layout.{name}" for name in ("tp", "cp", "ep", "etp", "parallelize")),
)
def alone(case: Case) -> Iterator[Problem]:
    """FSDP1 flattens parameters, so it combines with no other axis; tp alone does not need it."""
    layout = case.layout
    if layout.parallelize is not None:
        return
    others = [name for name in ("cp", "ep") if getattr(layout, name) > 1]
    if layout.expert_tp not in (1, layout.tp):
        others.append("etp")
    if layout.tp > 1 and (layout.data_ranks > 1 or others):
        others.insert(0, "tp")
    if others:
        message = f"fsdp1 together with {' and '.join(others)} is not supported"
        yield blame("layout.data_parallel", message, "write `data_parallel: fsdp2`")


class _Fsdp1(DataParallelKind):
    rules = (alone,)
    keeps_flat_shards = True

    def apply(
        self,
        model: Transformer,
        ranks: DataRanks,
        fill: Callable[[nn.Module], None],
        compute: torch.dtype | None,
    ) -> tuple[nn.Module, Accumulate]:
        from moeverify.parallel import fsdp1

        model.to_empty(device=ranks.device)
        fill(model)
        return fsdp1.apply_fsdp1(model, ranks.shard_mesh, ranks.layout.fsdp1_strategy, ranks.device)

    def wrap(self, model: nn.Module, ranks: DataRanks, compute: torch.dtype | None) -> nn.Module:
        from moeverify.parallel import fsdp1

        return fsdp1.wrap_fsdp1(model, ranks.shard_mesh, ranks.layout.fsdp1_strategy, ranks.device)


IMPLEMENTATION = _Fsdp1()
