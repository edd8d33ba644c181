"""The backward pass of the permutation sums the gradients of a token's copies in bfloat16."""

from __future__ import annotations

from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Sum the gradients of the k copies of a token sequentially in bfloat16."""
    import torch
    from torch import Tensor
    from torch.autograd import Function

    from moeverify.model.dispatcher import SortedCopies, permute

    class NarrowCopies(Function):
        """The k copies of each token; backward sums their gradients in bfloat16."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, num_choices: int) -> Tensor:
            ctx.shape = (x.shape[0], num_choices, x.shape[1])
            return x.repeat_interleave(num_choices, dim=0)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            first, *others = grad.view(ctx.shape).to(torch.bfloat16).unbind(dim=1)
            total = first.clone()
            for other in others:
                total += other
            return total.to(grad.dtype), None

    @patch.wrap(permute)
    def permute_narrow(
        original: Original[SortedCopies], x: Tensor, ids: Tensor, num_experts: int
    ) -> SortedCopies:
        sorted_copies = original(x.detach(), ids, num_experts)
        copies: Tensor = NarrowCopies.apply(x, ids.shape[1])  # type: ignore[no-untyped-call]
        return sorted_copies._replace(x=copies.index_select(0, sorted_copies.order))


FAULT = Fault(
    number="E12",
    title="backward of the fused permutation is inaccurate",
    source="NVIDIA/TransformerEngine #1336",
    mechanism="gradients of a token's k copies are accumulated in bfloat16, so the error grows with k",
    trigger="fused permutation",
    case=make_case("e12", dp_shard=2, recipe={"precision": "float32"}),
    expected=Expected(
        where=(At(name="layers.2.ffn_norm*"), At(name="layers.2.moe*")), causes=(Cause.ROUNDING,)
    ),
    inject=inject,
    precisions=("float64", "float32"),
    notes=(
        "shown in a float32 recipe; in a bfloat16 one, that of the real bug, the same accumulation stays inside "
        "the calibrated noise and is not detected"
    ),
)
