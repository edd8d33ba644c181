"""Every tp rank adds the experts' output bias before the outputs are summed over tp."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Let all ranks of a tp group add the replicated bias, as if tp were 1."""
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from moeverify.model.experts import Experts
    from moeverify.parallel.expert import MakeDispatcher, apply_expert_parallel

    @patch.wrap(apply_expert_parallel)
    def add_everywhere(
        original: Original[None], model: nn.Module, mesh: DeviceMesh, make_dispatcher: MakeDispatcher
    ) -> None:
        original(model, mesh, make_dispatcher)
        for module in model.modules():
            if isinstance(module, Experts):
                module.add_down_bias = True


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
