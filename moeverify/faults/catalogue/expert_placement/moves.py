"""Helpers of this class: cases with placements and exchanges, and changes of the moved rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from moeverify.cases.schema import Case
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from moeverify.parallel.move_experts import Journey

BEFORE = ((0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11, 12, 13, 14, 15))
AFTER = ((0, 8, 2, 3, 12, 5, 6, 15), (1, 9, 10, 11, 4, 13, 14, 7))
REPLICAS = ((0, 1, 2, 3, 4, 5, 6, 7, 8), (2, 7, 8, 9, 10, 11, 12, 13, 14, 15))


def make_placed_case(name: str, **options: Any) -> Case:
    """Return a case with replicas on two ranks."""
    return make_case(name, **{"dp_shard": 2, "ep": 2, "placement": REPLICAS, **options})


def make_exchange_case(name: str, after: Any = AFTER, **options: Any) -> Case:
    """Return a case of three steps in which experts move after the first. AdamW has two moments."""
    return make_case(
        name,
        **{
            "dp_shard": 2,
            "ep": 2,
            "placement": BEFORE,
            "exchange": {"1": after},
            "optimizer": "adamw",
            "recipe": {"steps": 3},
            **options,
        },
    )


def list_arrivals(journey: Journey, rank: int) -> list[tuple[int, int]]:
    """Return (row, expert) of each expert that is new on a rank after the exchange."""
    before = journey.before[rank]
    return [(row, expert) for row, expert in enumerate(journey.after[rank]) if expert not in before]


def change_moves(
    patch: Patch,
    change: Callable[[Sequence[Tensor], list[Tensor], Journey, ProcessGroup], list[Tensor]],
) -> None:
    """Replace the result of each exchange by `change(tensors before, tensors after, journey, group)`."""
    from moeverify.parallel.move_experts import move_rows

    @patch.wrap(move_rows)
    def moved(
        original: Original[list[Tensor]], tensors: Sequence[Tensor], journey: Journey, group: ProcessGroup
    ) -> list[Tensor]:
        return change(tensors, original(tensors, journey, group), journey, group)
