"""fully_shard: every parameter is a DTensor, sharded over dp_shard and cp; with dp_replicate a hybrid (HSDP)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moeverify.parallel.data_parallel import DataParallelKind, DataRanks
from moeverify.parallel.fsdp2_reshard import RESHARD

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from moeverify.model.transformer import Transformer
    from moeverify.parallel.ddp import Accumulate
    from moeverify.parallel.gradients import Reduction


class _Fsdp2(DataParallelKind):
    takes_mixed_precision = True
    runs_in_pipelines = True

    def apply(
        self,
        model: Transformer,
        ranks: DataRanks,
        fill: Callable[[nn.Module], None],
        compute: torch.dtype | None,
    ) -> tuple[nn.Module, Accumulate]:
        from moeverify.parallel import fsdp2

        policy = fsdp2.choose_policy(model, compute)
        num_loss_ranks = ranks.meshes.size("loss")
        reshard = RESHARD.find(ranks.layout.reshard)
        accumulate = fsdp2.apply_fsdp2(
            model, ranks.shard_mesh, ranks.expert_mesh, num_loss_ranks, policy, reshard
        )
        if ranks.layout.pp > 1:
            fsdp2.keep_gathered(model)
        # The model was sharded on meta, so each rank allocates and fills only its shards.
        model.to_empty(device=ranks.device)
        fill(model)
        return model, accumulate

    def wrap(self, model: nn.Module, ranks: DataRanks, compute: torch.dtype | None) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        from moeverify.parallel import fsdp2

        fully_shard(model, mesh=ranks.shard_mesh, mp_policy=fsdp2.choose_policy(model, compute))
        return model

    def complete_experts(
        self, experts: Sequence[Tensor], mesh: DeviceMesh, num_loss_ranks: int
    ) -> list[Reduction]:
        from moeverify.parallel.fsdp2 import expert_divisor
        from moeverify.parallel.gradients import Reduction

        rest = expert_divisor(mesh, num_loss_ranks)
        return [] if rest is None else [Reduction(experts, None, rest)]


IMPLEMENTATION = _Fsdp2()
