"""Keys and values are gathered along the heads, although cp splits the positions."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Gather keys and values (B, s, N, D) along N; positions stay local."""
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from moeverify.parallel.collectives import all_gather_sum

    @patch.wrap(all_gather_sum)
    def gather_heads(original: Original[Tensor], x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        if x.ndim != 4:
            return x
        return original(x, 2, group)


FAULT = Fault(
    number="K02",
    title="context parallelism gathers heads where it has cut positions",
    source="pytorch/torchtitan PR #3681 (a695565f5)",
    mechanism="Shard(2), the heads, is declared where the keys are Shard(1)",
    trigger="context parallelism by all-gather",
    case=make_case("k02", cp=2, context_parallel="allgather"),
    expected=Expected(where=(At(name="*.attention*"),), causes=(Cause.FORWARD,)),
    inject=inject,
    is_moe=False,
)
