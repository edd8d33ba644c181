"""DDP reduces over the data ranks and omits the ranks that share a sequence."""

from __future__ import annotations

from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Give DDP the group of data replicas, without cp."""
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup

    from moeverify.cases.schema import Layout
    from moeverify.model.transformer import Transformer
    from moeverify.parallel.ddp import Accumulate, apply_ddp
    from moeverify.parallel.meshes import Meshes
    from moeverify.parallel.plan import apply_data_parallel

    groups: list[ProcessGroup] = []

    @patch.wrap(apply_data_parallel)
    def remember_group(
        original: Original[tuple[nn.Module, Accumulate]],
        model: Transformer,
        layout: Layout,
        meshes: Meshes,
        *args: Any,
        **named: Any,
    ) -> tuple[nn.Module, Accumulate]:
        groups[:] = [meshes.group("dp_replicate")]
        return original(model, layout, meshes, *args, **named)

    @patch.wrap(apply_ddp)
    def use_group(
        original: Original[tuple[nn.Module, Accumulate]],
        model: nn.Module,
        group: ProcessGroup,
        device: torch.device,
        **options: Any,
    ) -> tuple[nn.Module, Accumulate]:
        return original(model, groups[0], device, **options)


FAULT = Fault(
    number="I02",
    title="DDP does not reduce over the ranks of a sequence",
    source="ByteDance-Seed/VeOmni #1059, PR #1115",
    mechanism="DDP's group is that of data parallelism alone; with one data rank its all-reduce does nothing",
    trigger="DDP with Ulysses or context parallelism",
    case=make_case("i02", preset="tiny-gpt", data_parallel="ddp", cp=2, context_parallel="alltoall"),
    expected=Expected(where=(At(axis="cp"),), causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
    is_moe=False,
)
