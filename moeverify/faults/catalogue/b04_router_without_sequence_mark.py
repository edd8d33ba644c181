"""With sequence parallelism the router sees a slice of the tokens, and its weight is not marked as such."""

from __future__ import annotations

from torch import Tensor, nn

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.model.router import Router
from moeverify.parallel import moe_tensor
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject() -> None:
    """Take the weights of routers off the list of those whose gradients are summed over tp."""

    def partial_parameters(model: nn.Module, *, tokens: bool) -> list[Tensor]:
        unmarked = {id(module.weight) for module in model.modules() if isinstance(module, Router)}
        return [found for found in original(model, tokens=tokens) if id(found) not in unmarked]

    original = moe_tensor.partial_parameters
    moe_tensor.partial_parameters = partial_parameters


FAULT = Fault(
    number="B04",
    title="the router's weight lacks the mark of sequence parallelism",
    source="NVIDIA/Megatron-LM issue #599, PR #619",
    mechanism="parameters without the attribute are left out of the all-reduce over tp that sequence slices need",
    trigger="tp with sequence parallelism and experts",
    case=make_case("b04", tp=2, ep=2, sequence_parallel=True),
    expected=Expected(where=(At(name="*.moe.router.weight"),), causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
)
