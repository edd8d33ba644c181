"""The key norm's backward starts before the keys' gradient has arrived from the other ranks."""

from __future__ import annotations

from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Zero the parts of the keys' gradient that other ranks send."""
    import torch
    from torch import Tensor
    from torch.autograd import Function
    from torch.distributed import ProcessGroup

    from moeverify.parallel.context_parallel.alltoall import AllToAllCore

    class OwnHeads(Function):
        """Identity on the keys; of their gradient only the local heads are kept."""

        @staticmethod
        def forward(ctx: Any, keys: Tensor, group: ProcessGroup) -> Tensor:
            ctx.group = group
            return keys.view_as(keys)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            parts = list(grad.chunk(ctx.group.size(), dim=2))
            present = ctx.group.rank()
            arrived = [part if r == present else torch.zeros_like(part) for r, part in enumerate(parts)]
            return torch.cat(arrived, dim=2), None

    @patch.wrap(AllToAllCore.__call__)
    def attend_early(
        original: Original[Tensor], self: AllToAllCore, q: Tensor, k: Tensor, v: Tensor, positions: Tensor
    ) -> Tensor:
        early: Tensor = OwnHeads.apply(k, self.group)  # type: ignore[no-untyped-call]
        return original(self, q, early, v, positions)


FAULT = Fault(
    number="J14",
    title="the key norm's backward does not wait for the gradient of the keys",
    source="ByteDance-Seed/VeOmni PR #419",
    mechanism="the norm's backward runs before the asynchronous all-to-all of the keys' gradient is waited for",
    trigger="Ulysses with asynchronous exchanges and a key norm",
    case=make_case("j14", preset="tiny-gpt", model={"qk_norm": True}, cp=2, context_parallel="alltoall"),
    expected=Expected(where=(At(name="*.attention*"),), causes=(Cause.BACKWARD,)),
    inject=inject,
    is_moe=False,
    notes="upstream read whatever the buffer held; here that is zeros, so that the fault is the same in each run",
)
