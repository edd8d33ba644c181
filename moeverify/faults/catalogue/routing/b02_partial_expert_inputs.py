"""The gradient at the inputs of sliced experts stays partial, but the combine weights' gradient is summed."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Skip the gradient sum for the tokens of sliced experts, but not for the combine weights."""
    from torch import Tensor

    from moeverify.model.dispatcher import ExpertFunction
    from moeverify.parallel.collectives import copy_to, reduce_from
    from moeverify.parallel.moe_tensor import SlicedDispatcher

    @patch.replace(SlicedDispatcher.__call__)
    def dispatch(
        self: SlicedDispatcher, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction
    ) -> Tensor:
        return reduce_from(self.inner(x, ids, copy_to(weights, self.group), experts), self.group)


FAULT = Fault(
    number="B02",
    title="everything below the routed experts gets one rank's share of their gradient",
    source="pytorch/torchtitan issue #1805, PR #1878 (3ff755178)",
    mechanism=(
        "the experts' input is replicated and their weights are shards of tp, so the gradient of the "
        "input is a partial sum that nobody adds up"
    ),
    trigger="tp without expert parallelism",
    case=make_case("b02", tp=2),
    expected=Expected(
        where=(
            At(name="*.moe*"),
            At(axis="tp"),
        ),
        causes=(Cause.MISSING_REDUCTION,),
    ),
    inject=inject,
)
