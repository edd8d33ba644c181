"""What a user's own step makes otherwise on one device than the recipe says.

Some checks compute again what a rank's step has made, from what went into it, by the optimizer and the clip of the
recipe. A user's step may change a gradient between the clip and the optimizer, or in a hook of the optimizer's, as
Muon does. Where one device's step is not what these checks compute, and nothing that they know explains how it
differs, they have nothing to hold a rank to: what is left is the comparison with the golden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from moeverify.case.schema import Case, Recipe, Tolerance
from moeverify.checks.base import ALONE, Check, RankRun, Shown, Training, Watch
from moeverify.checks.bounds import Bounds
from moeverify.checks.observers import open_observers
from moeverify.collectives.trace import CollectiveTrace
from moeverify.golden.store import OwnResult
from moeverify.layout.observer import Observer
from moeverify.layout.region import Region
from moeverify.results.facts import names_operation
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train


def list_own_results(recipe: Recipe, checks: Sequence[Check[Any]], device: torch.device) -> list[OwnResult]:
    """Return of what one device's own step makes what is not as these checks compute it, in no way that they name.

    A mistake that they name, such as a learning rate of another step, stays one to be found on the ranks.
    """
    if recipe.step is None:
        return []
    case = Case(name=recipe.name, recipe=recipe, layout=ALONE)
    program = assemble_single(recipe, device)
    run = RankRun(case, CollectiveTrace(), entries=list, train_again=_train_no_more)
    watches: dict[Check[Any], Watch[Any]] = {}
    for check in checks:
        watch = check.watch(run, program) if check.recomputes_step else None
        if watch is not None:
            watches[check] = watch
    with open_observers(Training(recipe, program), _Unseen(), (), list(watches.values())) as observer:
        train(recipe, program, observer)
    shown = Shown(
        case=case,
        coordinates={0: {}},
        tensors={},
        bounds=Bounds(Tolerance(), recipe.precision, {}),
        golden_names={},
    )
    outcomes = [check.judge(shown, [watch.report()]) for check, watch in watches.items()]
    findings = [finding for outcome in outcomes if outcome is not None for finding in outcome.findings]
    return sorted(
        {(each.check, each.kind, each.tensor) for each in findings if not names_operation(each.facts)}
    )


class _Unseen:
    """An observer that looks at nothing: the watches before it do."""

    def begin_step(self, step: int) -> None:
        """See nothing."""

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """See nothing."""


def _train_no_more(observer: Observer, num_steps: int) -> NoReturn:
    raise RuntimeError("one device's own step is trained once")
