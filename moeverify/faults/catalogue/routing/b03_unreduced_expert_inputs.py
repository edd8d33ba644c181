"""Without ep, the partial gradient at the experts' inputs on each tp rank is treated as complete."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Skip the gradient sum for the tokens and combine weights of sliced experts."""
    from torch import Tensor

    from moeverify.model.dispatcher import ExpertFunction
    from moeverify.parallel.collectives import reduce_from
    from moeverify.parallel.moe_tensor import SlicedDispatcher

    @patch.replace(SlicedDispatcher.__call__)
    def dispatch(
        self: SlicedDispatcher, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction
    ) -> Tensor:
        return reduce_from(self.inner(x, ids, weights, experts), self.group)


FAULT = Fault(
    number="B03",
    title="gradients below tensor-parallel experts lose their reduction",
    source="pytorch/torchtitan PR #4054 (ecae62f15)",
    mechanism="input gradients of the experts default to Replicate, so each rank keeps its own share of the sum",
    trigger="tp without expert parallelism",
    case=make_case("b03", tp=2),
    expected=Expected(where=(At(name="*.moe*"), At(axis="tp")), causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
    notes="upstream's routers were off most; everything below an MoE block loses the same partial sums",
)
