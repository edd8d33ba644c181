"""Norms of the residual stream are summed over tp in only one mode of sequence parallelism."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Mark the norms of the residual stream as without sequence parallelism."""
    from torch import Tensor

    from moeverify.model.transformer import Transformer
    from moeverify.parallel.tensor import partial_parameters

    @patch.wrap(partial_parameters)
    def forget_stream_norms(
        original: Original[list[Tensor]], model: Transformer, *, sequence_parallel: bool
    ) -> list[Tensor]:
        return original(model, sequence_parallel=False)


FAULT = Fault(
    number="J07",
    title="sequence-parallel norms lose their reduction",
    source="InternLM/InternEvo PR #53 (663ef2e), PR #534 (432bd5e)",
    mechanism="the hook that sums the gradients of norms over tp is attached in one branch of the overlap modes only",
    trigger="tp with sequence parallelism",
    case=make_case("j07", preset="tiny-gpt", tp=2, sequence_parallel=True),
    expected=Expected(
        where=(At(name="*norm.weight", axis="tp"), At(name="*norm.bias", axis="tp")),
        causes=(Cause.MISSING_REDUCTION,),
    ),
    inject=inject,
    is_moe=False,
)
