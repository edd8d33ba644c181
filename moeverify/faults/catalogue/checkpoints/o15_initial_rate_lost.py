"""The initial rate of the schedule is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_saved_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Delete the initial rate, so that the schedule starts from the current one."""
    from moeverify.train.state import TrainingState

    @patch.wrap(TrainingState.restore_groups)
    def lose_initial_rate(
        original: Original[None], self: TrainingState, by_name: Mapping[str, Mapping[str, Any]]
    ) -> None:
        original(self, by_name)
        for group in self.optimizer.param_groups:
            del group["initial_lr"]
            group.setdefault("initial_lr", group["lr"])


FAULT = Fault(
    number="O15",
    title="the schedule goes on from the rate of the save",
    source="pytorch/pytorch issue #140900; pytorch/torchtitan PR #4168",
    mechanism="initial_lr is not in what is loaded, and a fresh scheduler takes the present rate for it",
    trigger="a rate that falls",
    saver=make_saved_case("o15", dp_shard=2),
    case=make_saved_case("o15", dp_shard=2),
    expected=Expected(where=(At(name="*initial_lr"), At(name="*scheduled lr*")), causes=(Cause.STATE,)),
    inject=inject,
    is_moe=False,
)
