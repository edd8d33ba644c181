"""Other ranks overwrite parts of the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_saved_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Save the moments of the last rank's experts under all experts."""
    import torch.distributed as dist
    from torch import Tensor

    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.tools.checkpoint import save
    from moeverify.tools.checkpoint.hyperrect import Hyperrect
    from moeverify.tools.checkpoint.writer import Part

    @patch.wrap(save.list_parts, used_by=save)
    def let_last_rank_write(
        original: Original[tuple[list[Part], dict[str, Tensor]]], tensors: Sequence[LocalShard]
    ) -> tuple[list[Part], dict[str, Tensor]]:
        parts, state = original(tensors)
        kept: list[Part] = []
        values: dict[str, Tensor] = {}
        for number, part in enumerate(parts):
            boxes = [part.box]
            if part.key.startswith("optimizer/") and ".experts." in part.key and part.shape:
                last = dist.get_rank() == dist.get_world_size() - 1
                starts = range(0, part.shape[0], part.box.shape[0]) if last else ()
                boxes = [Hyperrect((start, *part.box.offset[1:]), part.box.shape) for start in starts]
            for box in boxes:
                values[str(len(kept))] = state[str(number)]
                kept.append(part._replace(box=box))
        return kept, values


FAULT = Fault(
    number="O18",
    title="the moments of experts are saved under one name by all ranks",
    source="NVIDIA-NeMo/Automodel PR #3250 (3e795abac)",
    mechanism=(
        "the part of the optimizer that belongs to experts has one file name on all ep ranks, and the "
        "last one to write wins"
    ),
    trigger="expert parallelism",
    saver=make_saved_case("o18", dp_shard=2, ep=2),
    case=make_saved_case("o18", dp_shard=2, ep=2),
    expected=Expected(where=(At(name="optimizer/*.moe.experts*"),), causes=(Cause.DUPLICATE,)),
    inject=inject,
    notes="status of the report: title only",
)
