"""DDP reduces over the data ranks and leaves out those that share a sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from moeverify.case.schema import Layout
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.model.transformer import Transformer
from moeverify.parallel import ddp, plan
from moeverify.parallel.ddp import Accumulate
from moeverify.parallel.meshes import Meshes
from moeverify.results.cause import Cause


def inject() -> None:
    """Give DDP the group of the replicas of the data, without cp."""
    groups: list[ProcessGroup] = []

    def apply_data_parallel(
        model: Transformer, layout: Layout, meshes: Meshes, *rest: Any
    ) -> tuple[nn.Module, Accumulate]:
        groups[:] = [meshes.group("dp_replicate")]
        return apply(model, layout, meshes, *rest)

    def apply_ddp(
        model: nn.Module, group: ProcessGroup, device: torch.device
    ) -> tuple[nn.Module, Accumulate]:
        return wrap(model, groups[0], device)

    apply, wrap = plan._apply_data_parallel, ddp.apply_ddp
    plan._apply_data_parallel, ddp.apply_ddp = apply_data_parallel, apply_ddp


FAULT = Fault(
    number="I02",
    title="DDP does not reduce over the ranks of a sequence",
    source="ByteDance-Seed/VeOmni #1059, PR #1115",
    mechanism="DDP's group is that of data parallelism alone; with one data rank its all-reduce does nothing",
    trigger="DDP with Ulysses or context parallelism",
    case=make_case("i02", preset="tiny-gpt", data_parallel="ddp", cp=2, context_parallel="alltoall"),
    expected=Expected(where=r"axis .*\bcp\b", causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
    is_moe=False,
)
