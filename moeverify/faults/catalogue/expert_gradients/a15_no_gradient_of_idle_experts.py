"""Experts of a rank without tokens get no gradient, so the optimizer skips them."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Drop the gradients of experts if all of them on this rank are zero."""
    import torch
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    from moeverify.parallel.gradients import Reduction, finalize_gradients

    @patch.wrap(finalize_gradients)
    def drop_idle(
        original: Original[None], parameters: Sequence[Tensor], reductions: Sequence[Reduction]
    ) -> None:
        original(parameters, reductions)
        sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
        gradients = [parameter.grad for parameter in sharded if isinstance(parameter.grad, DTensor)]
        if not any(bool(torch.any(gradient.to_local() != 0)) for gradient in gradients):
            for parameter in sharded:
                parameter.grad = None


FAULT = Fault(
    number="A15",
    title="experts without tokens have no gradient, so their optimizer state stands still",
    source="NVIDIA-NeMo/Automodel PR #2995 (item 3)",
    mechanism=(
        "where a rank gets no tokens its dummy branch touches one weight alone; the others keep no "
        "gradient, and AdamW neither decays nor steps them"
    ),
    trigger="expert parallelism, a rank whose experts get no token",
    case=make_case(
        "a15",
        dp_replicate=2,
        data_parallel="ddp",
        ep=2,
        optimizer="adamw",
        moe={"idle_experts": 8, "num_groups": 1, "top_groups": 1},
    ),
    expected=Expected(
        where=(At(name="*.moe.experts*"),),
        causes=(
            Cause.STALE,
            Cause.DETACHED,
        ),
    ),
    inject=inject,
)
