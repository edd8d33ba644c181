"""Accumulation starts from the contents of a reused buffer: the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage


def inject(patch: Patch) -> None:
    """Add the weight to each gradient from the second step on."""
    from torch import Tensor
    from torch.utils.weak import WeakIdKeyDictionary

    from moeverify.parallel.gradients import Reduction, finalize_gradients

    num_steps: Any = WeakIdKeyDictionary()  # by the first parameter of a run

    @patch.wrap(finalize_gradients)
    def begin_from_weights(
        original: Original[None], parameters: Sequence[Tensor], reductions: Sequence[Reduction]
    ) -> None:
        original(parameters, reductions)
        num_steps[parameters[0]] = num_steps.get(parameters[0], 0) + 1
        if num_steps[parameters[0]] > 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach())


FAULT = Fault(
    number="N03",
    title="gradients begin from the weights in a buffer that is used again",
    source="NVIDIA/Megatron-LM PR #4609 (b25a76e000)",
    mechanism=(
        "the buffer of gradients receives gathered parameters and is not set to zero: the next "
        "accumulation starts from them"
    ),
    trigger="overlapped gathers, from the second step on",
    case=make_case("n03", preset="tiny-gpt", dp_replicate=2, data_parallel="ddp"),
    expected=Expected(where=(At(stage=Stage.BACKWARD),), causes=(Cause.STALE,)),
    inject=inject,
    is_moe=False,
)
