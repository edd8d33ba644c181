"""A non-strict load skips unknown names."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_saved_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

_OURS, _THEIRS = "layers.1.moe.experts.up", "layers.1.moe.experts.w3"


def inject(patch: Patch) -> None:
    """Save a weight under another name, and load only the weights that match."""
    from torch import Tensor

    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.tools.checkpoint import load, save
    from moeverify.tools.checkpoint.writer import Part

    def rename(part: Part) -> Part:
        return part._replace(key=f"weight/{_THEIRS}") if part.key == f"weight/{_OURS}" else part

    @patch.wrap(save.list_parts, used_by=save)
    def list_renamed(
        original: Original[tuple[list[Part], dict[str, Tensor]]], tensors: Sequence[LocalShard]
    ) -> tuple[list[Part], dict[str, Tensor]]:
        parts, state = original(tensors)
        return [rename(part) for part in parts], state

    @patch.wrap(save.list_parts, used_by=load)
    def list_known(
        original: Original[tuple[list[Part], dict[str, Tensor]]], tensors: Sequence[LocalShard]
    ) -> tuple[list[Part], dict[str, Tensor]]:
        return original([shard for shard in tensors if shard.name != f"weight/{_OURS}"])

    patch.replace(load.find_misfits)(lambda folder, manifest, tensors: iter(()))
    patch.replace(load.refuse)(lambda folder, superfluous: None)


FAULT = Fault(
    number="O07",
    title="a renamed expert weight is silently not loaded",
    source="pytorch/torchtitan PR #3626 (2816b97c2); NVIDIA/Megatron-LM issue #5844",
    mechanism=(
        "the name of an expert weight differs between the one who saves and the one who loads, and "
        "the load is not strict"
    ),
    trigger="a conversion of names, strict=False",
    saver=make_saved_case("o07", dp_shard=2, ep=2),
    case=make_saved_case("o07", dp_shard=2, ep=2),
    expected=Expected(where=(At(name="weight/layers.1.moe.experts.up*"),), causes=(Cause.NOT_LOADED,)),
    inject=inject,
)
