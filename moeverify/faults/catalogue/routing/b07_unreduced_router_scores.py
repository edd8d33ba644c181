"""The gradient of the routing weights covers only a rank's own experts, and is never summed."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Skip the gradient sum for the combine weights of sliced experts, but not for the tokens."""
    from torch import Tensor

    from moeverify.model.dispatcher import ExpertFunction
    from moeverify.parallel.collectives import copy_to, reduce_from
    from moeverify.parallel.moe_tensor import SlicedDispatcher

    @patch.replace(SlicedDispatcher.__call__)
    def dispatch(
        self: SlicedDispatcher, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction
    ) -> Tensor:
        return reduce_from(self.inner(copy_to(x, self.group), ids, weights, experts), self.group)


FAULT = Fault(
    number="B07",
    title="the gradient of the routing weights misses the other ranks' experts",
    source="huggingface/transformers PR #48205, second item",
    mechanism="all ranks route all tokens, each gets score gradients from its own experts only, nothing sums them",
    trigger="experts divided over ranks that hold the same tokens",
    case=make_case("b07", tp=2),
    expected=Expected(where=(At(name="*.moe.router*"), At(axis="tp")), causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
    notes="upstream each of these ranks holds some whole experts, here a slice of every expert",
)
