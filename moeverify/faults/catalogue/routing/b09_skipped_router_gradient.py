"""The hook that passes gradients to the sharded optimizer never fires for routers, which stay unchanged."""

from __future__ import annotations

from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Remove router gradients before the reduction that passes gradients to the optimizer."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from moeverify.model.router import Router

    @patch.wrap(FSDPParamGroup.post_backward)
    def post_backward(original: Original[None], self: FSDPParamGroup, *unused: Any) -> None:
        for parameter in self.fsdp_params:
            if isinstance(parameter._module_info.module, Router):
                parameter.unsharded_param.grad = None
        original(self, *unused)


FAULT = Fault(
    number="B09",
    title="the router's weights are never updated",
    source="deepspeedai/DeepSpeed issue #4482",
    mechanism="gradient hooks of the gates do not fire, so their gradients never reach the sharded optimizer",
    trigger="sharded gradients with expert parallelism",
    case=make_case("b09", dp_shard=2, ep=2),
    expected=Expected(where=(At(name="*.moe.router*"),), causes=(Cause.DETACHED,)),
    inject=inject,
    notes="open upstream; seen there under ZeRO-2",
)
