"""The offset of a rank's tokens is computed from the local count, so ranks overwrite each other."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Place each rank's outputs at 1/tp of their offset, and sum where they collide."""
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from moeverify.parallel import moe_tensor
    from moeverify.parallel.collectives import gather_from, reduce_from

    @patch.replace(gather_from, used_by=moe_tensor)
    def place_too_early(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        shape = list(x.shape)
        shape[dim] *= group.size()
        whole = x.new_zeros(shape)
        offset = x.shape[dim] // group.size() * group.rank()
        whole.narrow(dim, offset, x.shape[dim]).copy_(x)
        return reduce_from(whole, group)


FAULT = Fault(
    number="E02",
    title="tokens of different TP ranks collide",
    source="pytorch/torchtitan PR #1586 (9233d8318)",
    mechanism="the number of tokens is read after they were sharded, so the offset is 1/tp of the right one",
    trigger="EP that borrows TP (etp 1)",
    case=make_case("e02", tp=2, ep=2),
    expected=Expected(where=(At(name="*.moe*"),), causes=(Cause.FORWARD,)),
    inject=inject,
    notes="upstream reads the tokens at the same wrong offset too; here only the outputs are misplaced",
)
