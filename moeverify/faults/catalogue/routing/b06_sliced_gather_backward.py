"""The backward of an all-gather of tokens slices the gradient instead of summing it first."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Gather tokens and combine weights with a backward that returns the local slice of the gradient."""
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from moeverify.parallel import moe_tensor
    from moeverify.parallel.collectives import all_gather_sum, gather_from

    @patch.replace(all_gather_sum, used_by=moe_tensor)
    def gather_without_sum(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        return gather_from(x, dim, group)


FAULT = Fault(
    number="B06",
    title="each token gets the gradient of the experts on its own rank only",
    source="NVIDIA-NeMo/Automodel PR #1260",
    mechanism=(
        "the backward of a gathered DTensor assumes replicated gradients, and slices where it should "
        "reduce-scatter"
    ),
    trigger="experts on gathered tokens",
    case=make_case("b06", dp_shard=4, etp=2, ep=2),
    expected=Expected(
        where=(
            At(name="*.moe*"),
            At(axis="etp"),
        ),
        causes=(Cause.MISSING_REDUCTION,),
    ),
    inject=inject,
    notes="upstream gathers over ep; here the ranks that gather hold slices of the same experts",
)
