"""The data stream restarts after a load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_saved_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Set the position to the first batch after everything else is restored."""
    from moeverify.train.state import TrainingState

    @patch.wrap(TrainingState.restore)
    def begin_again(original: Original[None], self: TrainingState, facts: Mapping[str, Any]) -> None:
        original(self, facts)
        self.position = 0


FAULT = Fault(
    number="O16",
    title="the data begins again after a load",
    source="pytorch/torchtitan PR #3008; PrimeIntellect-ai/prime-rl PR #3332",
    mechanism="the position in the data is in the checkpoint, and the loader is started anew behind it",
    trigger="any load",
    saver=make_saved_case("o16", dp_shard=2),
    case=make_saved_case("o16", dp_shard=2),
    expected=Expected(where=(At(name="data position*"),), causes=(Cause.NOT_LOADED,)),
    inject=inject,
    is_moe=False,
)
