"""The backward of the experts' token slice lacks the all-gather."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Slice the positions of MoE inputs by plain indexing."""
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from moeverify.parallel import moe_tensor
    from moeverify.parallel.collectives import split_to

    @patch.replace(split_to, used_by=moe_tensor)
    def index(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        return x.chunk(group.size(), dim=dim)[group.rank()]


FAULT = Fault(
    number="B17",
    title="below the experts each rank keeps the gradient of its own slice of the tokens",
    source="laekov/fastmoe 704092b",
    mechanism="a slice of the batch over the model-parallel group is taken without a backward",
    trigger="tp that experts borrow, no sequence parallelism",
    case=make_case("b17", tp=2, ep=2, sequence_parallel=False),
    expected=Expected(
        where=(
            At(axis="tp"),
            At(name="*.moe*"),
        ),
        causes=(Cause.MISSING_REDUCTION,),
    ),
    inject=inject,
)
