"""Scores are rounded to bfloat16 before the choice, so that close scores become ties."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Choose experts by scores rounded to bfloat16."""
    import torch
    from torch import Tensor

    from moeverify.model.router import take_best

    @patch.wrap(take_best)
    def take_rounded(
        original: Original[tuple[Tensor, Tensor]], scores: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        return original(scores.to(torch.bfloat16).to(scores.dtype), count)


FAULT = Fault(
    number="E11",
    title="experts are chosen by scores in bfloat16",
    source="ViperEkura/AstrAI PR #57",
    mechanism="the softmax is cast before top-k, and close scores become ties",
    trigger="scores that are narrower than the router",
    case=make_case("e11", dp_shard=2, data={"seq_len": 64}),
    expected=Expected(
        where=(At(name="*.moe.router*"),),
        causes=(
            Cause.ROUTING,
            Cause.ROUNDING,
        ),
    ),
    inject=inject,
)
