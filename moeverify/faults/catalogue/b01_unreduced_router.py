"""Each tp rank routes its own tokens, and the router's gradient is taken for whole although it is an addend."""

from __future__ import annotations

from torch import Tensor, nn

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.model.router import Router
from moeverify.parallel import moe_tensor
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject() -> None:
    """Take all parameters of routers off the list of those whose gradients are summed over tp."""

    def partial_parameters(model: nn.Module, *, tokens: bool) -> list[Tensor]:
        routers = [module for module in model.modules() if isinstance(module, Router)]
        whole = {id(parameter) for router in routers for parameter in router.parameters()}
        return [found for found in original(model, tokens=tokens) if id(found) not in whole]

    original = moe_tensor.partial_parameters
    moe_tensor.partial_parameters = partial_parameters


FAULT = Fault(
    number="B01",
    title="the router's gradient is never summed over tp",
    source="pytorch/torchtitan issue #2387, PR #2416 (de329200b), PR #2388",
    mechanism="the router's output becomes a local tensor whose partial gradient is labelled as replicated",
    trigger="tp with expert parallelism that borrows it",
    case=make_case("b01", tp=2, ep=2),
    expected=Expected(where=(At(name="*.moe.router*"),), causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
)
