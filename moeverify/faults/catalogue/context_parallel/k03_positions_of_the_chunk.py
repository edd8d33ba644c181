"""Rotary positions start at 0 in every rank's part of the sequence."""

from __future__ import annotations

from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Rotate by the position in the local chunk; the attention mask stays right."""
    import torch
    from torch import Tensor

    from moeverify.model.rope import compute_rotation

    @patch.wrap(compute_rotation)
    def rotate_locally(
        original: Original[tuple[Tensor, Tensor]], positions: Tensor, *args: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        local = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
        return original(local, *args, **named)


FAULT = Fault(
    number="K03",
    title="RoPE restarts in every chunk of a sequence",
    source="thunlp/Seq1F1B #6; NVIDIA/Megatron-LM PR #1612; PrimeIntellect-ai/prime-rl PR #2392",
    mechanism="positions are counted in the local chunk, without the offset of the rank's part of the sequence",
    trigger="context or sequence parallelism",
    case=make_case("k03", preset="tiny-gpt", cp=2, context_parallel="alltoall"),
    expected=Expected(where=(At(name="*.attention*"),), causes=(Cause.FORWARD,)),
    inject=inject,
    is_moe=False,
)
