"""Routing weights are gathered over ep without a backward, so no token's loss trains the router."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Send the combine weights through an all-gather that autograd does not record."""
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from moeverify.model.dispatcher import ExpertFunction
    from moeverify.parallel.expert import AllToAllDispatcher

    @patch.wrap(AllToAllDispatcher.__call__)
    def dispatch(
        original: Original[Tensor],
        self: AllToAllDispatcher,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: ExpertFunction,
    ) -> Tensor:
        gathered = [torch.empty_like(weights) for _ in range(self.group.size())]
        dist.all_gather(gathered, weights.contiguous(), group=self.group)
        return original(self, x, ids, gathered[self.group.rank()], experts)


FAULT = Fault(
    number="B05",
    title="the router gets no gradient from the language model's loss",
    source="NVIDIA-NeMo/Automodel PR #2995, second item",
    mechanism="routing probabilities pass through dist.all_gather, which has no backward",
    trigger="expert parallelism; total where the auxiliary losses are off",
    case=make_case("b05", dp_shard=2, ep=2, moe={"balance_coef": 0.0, "z_coef": 0.0}),
    expected=Expected(where=(At(name="*.moe.router*"),), causes=(Cause.DETACHED,)),
    inject=inject,
)
