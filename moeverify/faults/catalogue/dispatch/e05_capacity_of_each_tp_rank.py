"""Each tp rank drops the copies beyond a capacity of its own."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

CAPACITY = 12  # copies of one expert on a rank


def inject(patch: Patch) -> None:
    """Zero the weights of copies beyond a capacity, which is lower on tp ranks above 0."""
    import torch
    from torch import Tensor

    from moeverify.model.dispatcher import ExpertFunction
    from moeverify.parallel.moe_tensor import SlicedDispatcher

    @patch.wrap(SlicedDispatcher.__call__)
    def drop_late(
        original: Original[Tensor],
        self: SlicedDispatcher,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: ExpertFunction,
    ) -> Tensor:
        flat = ids.flatten()
        same = flat.unsqueeze(0) == flat.unsqueeze(1)
        place = torch.tril(same, diagonal=-1).sum(dim=1).view_as(ids)
        capacity = len(flat) if self.group.rank() == 0 else CAPACITY
        return original(self, x, ids, weights * (place < capacity), experts)


FAULT = Fault(
    number="E05",
    title="ranks of tp drop other tokens",
    source="deepspeedai/DeepSpeed PR #5156",
    mechanism="the capacity of the experts is not aligned over tp, so slices of one expert work on other tokens",
    trigger="tp with expert capacity",
    case=make_case("e05", tp=2),
    expected=Expected(where=(At(name="*.moe*"),), causes=(Cause.FORWARD,)),
    inject=inject,
    notes="the model has no capacity: one rank of tp drops where the other keeps all",
)
