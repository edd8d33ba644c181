"""A wrong placement turns the experts of different ranks into replicas."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_saved_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Claim all experts on each rank, with the values of its own experts."""
    from torch import Tensor

    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.tools.checkpoint import save
    from moeverify.tools.checkpoint.hyperrect import Hyperrect
    from moeverify.tools.checkpoint.writer import Part

    @patch.wrap(save.list_parts, used_by=save)
    def claim_all_experts(
        original: Original[tuple[list[Part], dict[str, Tensor]]], tensors: Sequence[LocalShard]
    ) -> tuple[list[Part], dict[str, Tensor]]:
        parts, state = original(tensors)
        for number, part in list(enumerate(parts)):
            if not part.key.startswith("weight/") or ".experts." not in part.key:
                continue
            size = part.box.shape[0]
            for start in range(0, part.shape[0], size):
                if start != part.box.offset[0]:
                    box = Hyperrect((start, *part.box.offset[1:]), part.box.shape)
                    state[str(len(parts))] = state[str(number)]
                    parts.append(Part(part.key, part.shape, box))
        return parts, state


FAULT = Fault(
    number="O05",
    title="experts of different ranks are saved as replicas of each other",
    source="pytorch/torchtitan PR #2227 (8ff9e42a3)",
    mechanism=(
        "the placement of expert tensors says Replicate over ep: of different experts, those of one "
        "rank are saved for all"
    ),
    trigger="expert parallelism",
    saver=make_saved_case("o05", dp_shard=2, ep=2),
    case=make_saved_case("o05"),
    expected=Expected(
        where=(At(name="weight/*.moe.experts*"),),
        causes=(
            Cause.DUPLICATE,
            Cause.PERMUTATION,
        ),
    ),
    inject=inject,
)
