"""Results of a user's own step that differ from the recipe on one device already.

Some checks recompute the results of a rank's step from its inputs, with the recipe's optimizer and clip. A
user's step may change a gradient between the clip and the optimizer, or in an optimizer hook, as Muon does.
If the step on one device does not match these checks, and no known mistake explains the difference, the
checks have no reference for a rank. Such results are compared only with the golden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from moeverify.cases.schema import Case, Recipe, Tolerance
from moeverify.parallel.regions.observer import Observer
from moeverify.results.facts import names_operation
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train
from moeverify.verification.checks.base import ALONE, Check, RankRun, Shown, Training, Watch
from moeverify.verification.checks.bounds import Bounds
from moeverify.verification.checks.observers import Unseen, open_observers
from moeverify.verification.collectives.trace import CollectiveTrace
from moeverify.verification.golden.store import OwnResult


def list_own_results(recipe: Recipe, checks: Sequence[Check[Any]], device: torch.device) -> list[OwnResult]:
    """Return the results of a user's step on one device that the checks can neither reproduce nor explain.

    A mistake that the checks can name, such as the learning rate of another step, is not included. The
    checks then report it on the ranks.
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
    with open_observers(Training(recipe, program), Unseen(), (), list(watches.values())) as observer:
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


def _train_no_more(observer: Observer, num_steps: int) -> NoReturn:
    raise RuntimeError("one device's own step is trained once")
