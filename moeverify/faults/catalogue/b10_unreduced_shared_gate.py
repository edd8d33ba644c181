"""The gate of the shared expert is replicated and sees a slice of the tokens; its gradient is not summed."""

from __future__ import annotations

from torch import Tensor, nn

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.model.moe import MoE
from moeverify.parallel import moe_tensor
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject() -> None:
    """Take shared gates off the list of parameters whose gradients are summed over tp."""

    def partial_parameters(model: nn.Module, *, tokens: bool) -> list[Tensor]:
        gates = [module.shared_gate for module in model.modules() if isinstance(module, MoE)]
        whole = {id(gate.weight) for gate in gates if gate is not None}
        return [found for found in original(model, tokens=tokens) if id(found) not in whole]

    original = moe_tensor.partial_parameters
    moe_tensor.partial_parameters = partial_parameters


FAULT = Fault(
    number="B10",
    title="the gradient of the shared expert's gate is not summed over tp",
    source="alibaba/Pai-Megatron-Patch issue #397",
    mechanism="a replicated linear layer on a sequence shard is missing from the list of tp reductions",
    trigger="tp with sequence parallelism and a gated shared expert",
    case=make_case("b10", tp=2, ep=2, sequence_parallel=True),
    expected=Expected(where=(At(name="*.moe.shared_gate*"),), causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
)
