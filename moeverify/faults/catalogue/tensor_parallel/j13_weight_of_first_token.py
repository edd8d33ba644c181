"""The loss's backward uses the weight of the first token for all tokens."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Mask the token losses outside of a kernel that uses the first token's gradient for all."""
    from typing import Any

    import torch
    from torch import Tensor
    from torch.nn import functional

    from moeverify.train.data import IGNORED
    from moeverify.train.forward import cross_entropy

    class _Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
            ctx.save_for_backward(logits.softmax(dim=-1), targets)
            return functional.cross_entropy(logits, targets, reduction="none")

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            shares, targets = ctx.saved_tensors
            return (shares - functional.one_hot(targets, shares.shape[-1])) * grad[0], None

    @patch.replace(cross_entropy)
    def mask_outside(logits: Tensor, targets: Tensor) -> Tensor:
        flat: Tensor = _Kernel.apply(logits.flatten(0, 1), targets.clamp(min=0).flatten())  # type: ignore[no-untyped-call]
        return flat.view(targets.shape) * (targets != IGNORED)


FAULT = Fault(
    number="J13",
    title="all tokens get the gradient weight of the first",
    source="NVIDIA-NeMo/Automodel PR #3853",
    mechanism="a kernel of the loss without reduction takes the first incoming gradient for all tokens",
    trigger="tokens of unequal weight",
    case=make_case("j13", preset="tiny-gpt", tp=2),
    expected=Expected(
        where=(
            At(name="lm_head*"),
            At(name="backward"),
            At(term="lm"),
        ),
        causes=(Cause.PADDING,),
    ),
    inject=inject,
    is_moe=False,
    notes="weights are the mask of padding",
)
