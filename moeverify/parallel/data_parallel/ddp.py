"""DistributedDataParallel: every rank holds all parameters outside the experts, and gradients are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from moeverify.cases.rule import blame, reading
from moeverify.cases.schema import Case
from moeverify.errors import Problem
from moeverify.parallel.data_parallel import DataParallelKind, DataRanks

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from moeverify.model.transformer import Transformer
    from moeverify.parallel.ddp import Accumulate
    from moeverify.parallel.gradients import Reduction


@reading(
    *(f"layout.{name}" for name in ("data_parallel", "dp_replicate", "dp_shard", "tp", "cp", "parallelize"))
)
def whole_replicas(case: Case) -> Iterator[Problem]:
    """DDP holds the whole model on each rank."""
    layout = case.layout
    if layout.parallelize is not None:
        return
    if layout.dp_shard > 1:
        ranks = layout.data_ranks
        remedy = f"write `dp_replicate: {ranks}` and no dp_shard, or `data_parallel: fsdp2`"
        yield blame("layout.dp_shard", f"ddp shards nothing, so dp_shard cannot be {layout.dp_shard}", remedy)
    if layout.tp > 1 and layout.data_ranks * layout.cp > 1:
        message = "ddp together with tp is not supported"
        yield blame("layout.data_parallel", message, "write `data_parallel: fsdp2`")


class _Ddp(DataParallelKind):
    rules = (whole_replicas,)

    def apply(
        self,
        model: Transformer,
        ranks: DataRanks,
        fill: Callable[[nn.Module], None],
        compute: torch.dtype | None,
    ) -> tuple[nn.Module, Accumulate]:
        from moeverify.parallel import ddp

        model.to_empty(device=ranks.device)
        fill(model)
        return ddp.apply_ddp(model, ranks.meshes.group("loss"), ranks.device)

    def wrap(self, model: nn.Module, ranks: DataRanks, compute: torch.dtype | None) -> nn.Module:
        from moeverify.parallel import ddp

        return ddp.apply_ddp(model, ranks.meshes.group("loss"), ranks.device, find_unused=True)[0]

    def complete_experts(
        self, experts: Sequence[Tensor], mesh: DeviceMesh, num_loss_ranks: int
    ) -> list[Reduction]:
        from moeverify.parallel.gradients import Reduction

        # DDP ignores sharded experts. Their gradient contains the tokens of all loss ranks, so the divisor
        # is the number of loss ranks, as for every other gradient, and not the number of copies.
        return [Reduction(experts, mesh.get_group(), float(num_loss_ranks))]


IMPLEMENTATION = _Ddp()
