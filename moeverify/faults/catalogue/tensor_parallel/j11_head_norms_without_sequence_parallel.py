"""A norm over a rank's heads is summed over tp only with sequence parallelism."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Mark no norm for the sum over tp if sequence parallelism is off."""
    from torch import Tensor

    from moeverify.model.transformer import Transformer
    from moeverify.parallel.tensor import partial_parameters

    @patch.wrap(partial_parameters)
    def forget_head_norms(
        original: Original[list[Tensor]], model: Transformer, *, sequence_parallel: bool
    ) -> list[Tensor]:
        return original(model, sequence_parallel=sequence_parallel) if sequence_parallel else []


FAULT = Fault(
    number="J11",
    title="norms inside attention miss their sum over tp",
    source="NVIDIA/Megatron-LM #7452, item 11",
    mechanism="a replicated norm that sees the heads of one rank is marked for reduction by sequence_parallel alone",
    trigger="tp without sequence parallelism",
    case=make_case("j11", preset="tiny-gpt", model={"qk_norm": True}, tp=2),
    expected=Expected(where=(At(name="*.[qk]_norm.weight", axis="tp"),), causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
    is_moe=False,
    notes="upstream's norm was that of a gated delta net's outputs; here those of query and key heads",
)
