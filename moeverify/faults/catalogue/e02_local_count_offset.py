"""The offset of a rank's tokens is computed from their local number, so ranks write over each other."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from moeverify.diagnose.cause import Cause
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.parallel import moe_tensor
from moeverify.parallel.collectives import reduce_from


def inject() -> None:
    """Put each rank's outputs back at 1/tp of their offset and add up what collides."""

    def gather_from(y: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        shape = list(y.shape)
        shape[dim] *= group.size()
        offset = y.shape[dim] // group.size() * group.rank()
        whole = y.new_zeros(shape)
        whole.narrow(dim, offset, y.shape[dim]).copy_(y)
        return reduce_from(whole, group)

    moe_tensor.gather_from = gather_from


FAULT = Fault(
    number="E02",
    title="tokens of different TP ranks collide",
    source="pytorch/torchtitan PR #1586 (9233d8318)",
    mechanism="the number of tokens is read after they were sharded, so the offset is 1/tp of the right one",
    trigger="EP that borrows TP (etp 1)",
    case=make_case("e02", tp=2, ep=2),
    expected=Expected(where=r"moe", causes=(Cause.FORWARD,)),
    inject=inject,
    notes="upstream reads the tokens at the same wrong offset too; here only the outputs are misplaced",
)
