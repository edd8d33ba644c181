"""Experts that tp does not cut are treated like dense weights: their gradients are not reduced over tp."""

from __future__ import annotations

from torch import Tensor, nn

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.model.experts import Experts
from moeverify.parallel import moe_tensor
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject() -> None:
    """Leave the experts out of what is summed over tp."""

    def partial_parameters(model: nn.Module, *, tokens: bool) -> list[Tensor]:
        experts = {
            id(weight)
            for module in model.modules()
            if isinstance(module, Experts)
            for weight in module.parameters()
        }
        return [weight for weight in original(model, tokens=tokens) if id(weight) not in experts]

    original = moe_tensor.partial_parameters
    moe_tensor.partial_parameters = partial_parameters


FAULT = Fault(
    number="A10",
    title="expert gradients are reduced like dense ones where etp is not tp",
    source="NVIDIA/Megatron-LM #1628, PR #1622, PR #5916",
    mechanism="experts with ep 1 and etp unequal to tp are taken for dense weights, whose group leaves tp out",
    trigger="etp 1 with tp above 1 and ep 1",
    case=make_case("a10", tp=2, etp=1),
    expected=Expected(where=(At(name="*.moe.experts*", axis="tp"),), causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
)
