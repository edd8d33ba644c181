"""Outputs of token slices are reassembled as if the slices were cut from the flattened tokens."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Place local token i of rank r at i + r * local tokens, which is right only for one row."""
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from moeverify.parallel import moe_tensor
    from moeverify.parallel.collectives import gather_from

    @patch.wrap(gather_from, used_by=moe_tensor)
    def gather_flat(original: Original[Tensor], x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        return original(x.flatten(0, 1), 0, group).view(x.shape[0], -1, x.shape[2])


FAULT = Fault(
    number="E01",
    title="MoE outputs are added to the wrong tokens",
    source="pytorch/torchtitan PR #3604 (5ba439938)",
    mechanism="the global index of a token is taken as local index + rank * local tokens, whatever the rows",
    trigger="TP + EP with the positions sliced over TP, more than one row",
    case=make_case("e01", tp=2, ep=2),
    expected=Expected(where=(At(name="*.moe*"),), causes=(Cause.PERMUTATION, Cause.FORWARD)),
    inject=inject,
)
