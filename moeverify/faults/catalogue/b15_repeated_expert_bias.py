"""Every tp rank adds the experts' output bias before the outputs are summed over tp."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.model.experts import Experts
from moeverify.parallel import plan
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject() -> None:
    """Let all ranks of a tp group add the replicated bias, as if there were no tp."""

    def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
        original(model, mesh)
        for module in model.modules():
            if isinstance(module, Experts):
                module.add_down_bias = True

    original = plan.apply_expert_parallel
    plan.apply_expert_parallel = apply_expert_parallel


FAULT = Fault(
    number="B15",
    title="the experts' output bias is multiplied by the degree of tp",
    source="pytorch/torchtitan PR #4245 (ec30db9d0)",
    mechanism="the test for tp looked for DTensor parameters and found none, so every rank adds the whole bias",
    trigger="tp without expert parallelism, with output biases that are not zero",
    case=make_case("b15", tp=2),
    expected=Expected(where=(At(name="layers.*.moe*"),), causes=(Cause.FORWARD,)),
    inject=inject,
)
