"""A training step made of several calls omits the one that completes the gradients over tp."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Skip all reductions after the last backward pass."""
    from torch import Tensor

    from moeverify.parallel.gradients import Reduction, finalize_gradients

    @patch.wrap(finalize_gradients)
    def reduce_nothing(
        original: Original[None], parameters: Sequence[Tensor], reductions: Sequence[Reduction]
    ) -> None:
        original(parameters, [])


FAULT = Fault(
    number="J09",
    title="norms of query and key heads miss their sum over tp",
    source="NVIDIA-NeMo/RL #3716",
    mechanism="forward, backward and step are called one by one, and finalize_model_grads is not among them",
    trigger="tp with norms of query and key heads",
    case=make_case("j09", preset="tiny-gpt", model={"qk_norm": True}, tp=2, sequence_parallel=True),
    expected=Expected(
        where=(At(name="*norm.weight", axis="tp"), At(name="*norm.bias", axis="tp")),
        causes=(Cause.MISSING_REDUCTION,),
    ),
    inject=inject,
    is_moe=False,
)
