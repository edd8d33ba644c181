"""Parameter groups are matched by their position in a list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_saved_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Assign the saved options to the groups in order."""
    from moeverify.train.state import TrainingState

    @patch.replace(TrainingState.restore_groups)
    def restore_by_position(self: TrainingState, by_name: Mapping[str, Mapping[str, Any]]) -> None:
        saved: list[Mapping[str, Any]] = []
        for options in by_name.values():
            if options not in saved:
                saved.append(options)
        for number, group in enumerate(self.optimizer.param_groups):
            options = saved[min(number, len(saved) - 1)]
            group.update({key: options[key] for key in ("lr", "weight_decay", "initial_lr")})


FAULT = Fault(
    number="O13",
    title="the options of parameter groups are matched by position",
    source="NVIDIA/Megatron-LM !3394 (9a45638758)",
    mechanism=(
        "ranks have different groups, one of them empty and left out, and groups are matched one "
        "after the other: the wrong ones get decay and rate"
    ),
    trigger="groups that differ between the one who saves and the one who loads",
    saver=make_saved_case("o13", dp_shard=2),
    case=make_saved_case("o13", tp=2),
    expected=Expected(where=(At(name="*weight_decay"),), causes=(Cause.STATE,)),
    inject=inject,
    is_moe=False,
)
