"""Chunks returned by the experts are restored in the order of a transposed view of their counts."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Restore the rows by counts with exchanged rank axes (ep, tp)."""
    from torch import Tensor

    from moeverify.parallel.expert import order_by_expert

    @patch.wrap(order_by_expert)
    def restore_transposed(
        original: Original[tuple[Tensor, Tensor]], arriving: Tensor, num_rows: int
    ) -> tuple[Tensor, Tensor]:
        there, _ = original(arriving, num_rows)
        exchanged = arriving.view(2, len(arriving) // 2, -1).transpose(0, 1).reshape(arriving.shape)
        return there, original(exchanged, num_rows)[1]


FAULT = Fault(
    number="E03",
    title="tokens come back from the experts in another order",
    source="NVIDIA/Megatron-LM !2824 (54d4b3ddbb)",
    mechanism=(
        "a copy to the host overwrites the view of the counts, whose transpose then walks expert, ep, tp "
        "instead of expert, tp, ep"
    ),
    trigger="tp and ep together, more than one expert a rank",
    case=make_case("e03", dp_shard=2, tp=2, ep=4),
    expected=Expected(
        where=(At(name="*.moe*"),),
        causes=(
            Cause.FORWARD,
            Cause.PERMUTATION,
        ),
    ),
    inject=inject,
)
