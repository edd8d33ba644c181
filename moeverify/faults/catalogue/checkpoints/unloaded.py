"""Helper of this class: tensors that are read from the checkpoint but do not reach the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moeverify.faults.patch import Original, Patch

if TYPE_CHECKING:
    from moeverify.tools.checkpoint.writer import Part


def load_into_copies(patch: Patch, is_lost: Callable[[int, Part], bool]) -> None:
    """Load the parts for which `is_lost(number, part)` is true into copies of their tensors."""
    from torch import Tensor

    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.tools.checkpoint import load
    from moeverify.tools.checkpoint.save import list_parts

    @patch.wrap(list_parts, used_by=load)
    def list_copies(
        original: Original[tuple[list[Part], dict[str, Tensor]]], tensors: Sequence[LocalShard]
    ) -> tuple[list[Part], dict[str, Tensor]]:
        parts, state = original(tensors)
        for number, part in enumerate(parts):
            if is_lost(number, part):
                state[str(number)] = state[str(number)].clone()
        return parts, state
