"""FSDP ignores the routers, and therefore does not reduce their gradients."""

from __future__ import annotations

from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Pass the routers' parameters as ignored states when a module is wrapped."""
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel

    from moeverify.model.router import Router

    @patch.wrap(FullyShardedDataParallel.__init__)
    def ignore_routers(
        original: Original[None], self: FullyShardedDataParallel, module: nn.Module, *args: Any, **named: Any
    ) -> None:
        routers = [part for part in module.modules() if isinstance(part, Router)]
        ignored = [parameter for router in routers for parameter in router.parameters()]
        original(self, module, *args, **{**named, "ignored_states": ignored})


FAULT = Fault(
    number="I04",
    title="gradients of modules that FSDP ignores are not reduced",
    source="pytorch/pytorch #98281",
    mechanism="ignored parameters stay whole on each rank, and their gradients local unless the user sums them",
    trigger="FSDP1 with ignored modules, as experts and routers often are",
    case=make_case("i04", dp_shard=2, data_parallel="fsdp1"),
    expected=Expected(where=(At(name="*.moe.router*"),), causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
    is_moe=False,
)
