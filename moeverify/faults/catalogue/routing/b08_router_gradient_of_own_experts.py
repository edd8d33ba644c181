"""The gradient of the combine weights covers only the experts on the token's own rank."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

TOP_K = 3  # of the case's model


def inject(patch: Patch) -> None:
    """Gather the combine weights with a backward that returns the local slice of the gradient."""
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from moeverify.parallel import moe_tensor
    from moeverify.parallel.collectives import all_gather_sum, gather_from

    @patch.wrap(all_gather_sum, used_by=moe_tensor)
    def gather_weights_without_sum(
        original: Original[Tensor], x: Tensor, dim: int, group: ProcessGroup
    ) -> Tensor:
        is_weights = x.is_floating_point() and x.shape[-1] == TOP_K
        return gather_from(x, dim, group) if is_weights else original(x, dim, group)


FAULT = Fault(
    number="B08",
    title="the router's gradient lacks the experts of other ranks",
    source="huggingface/transformers issue #48687",
    mechanism="one of two kernels computes the gradient of the scores from the experts on its own rank",
    trigger="experts on gathered tokens",
    case=make_case("b08", dp_shard=4, etp=2, ep=2),
    expected=Expected(
        where=(
            At(name="*.moe*"),
            At(axis="etp"),
        ),
        causes=(Cause.MISSING_REDUCTION,),
    ),
    inject=inject,
)
