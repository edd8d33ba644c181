"""FSDP is told to ignore the routers, and then reduces their gradients over no rank."""

from __future__ import annotations

from typing import Any

from torch import nn

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.model.router import Router
from moeverify.parallel import fsdp1
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject() -> None:
    """Name the routers' parameters as ignored when a module is wrapped."""

    def wrap(module: nn.Module, **arguments: Any) -> Any:
        routers = [part for part in module.modules() if isinstance(part, Router)]
        ignored = [parameter for router in routers for parameter in router.parameters()]
        return original(module, ignored_states=ignored, **arguments)

    original = fsdp1.FullyShardedDataParallel
    fsdp1.FullyShardedDataParallel = wrap


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
