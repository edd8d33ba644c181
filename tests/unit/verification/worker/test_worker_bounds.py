"""The parts of bounds that a result carries: the widest step of each tensor of a check, and its sources."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moeverify.cases.schema import CustomModel, Recipe
from moeverify.parallel.regions.region import Region
from moeverify.results.bound import NearChoices
from moeverify.results.checks import CheckName, Kind
from moeverify.results.finding import CheckResult
from moeverify.verification.checks.base import CheckOutcome
from moeverify.verification.checks.golden_tensors import GoldenTensors
from moeverify.verification.golden.noise import FREE_KEY, HELD_KEY
from moeverify.verification.worker.error_map import count_choices, list_bounds


def test_the_widest_step_counts_and_exact_bounds_and_zeros_are_left_out(
    run_ranks: Callable, weight: Tensor
) -> None:
    keys = [(step, "gradient", name) for step in (0, 1, 2) for name in ("w", "plain")]
    noise = {"0/gradient/w": 1e-6, "1/gradient/w": 4e-6, "2/gradient/w": 2e-6}
    noise |= {"plain/1/gradient/w": 3e-6, "widest/1/gradient/w": 2.0, "widest/0/gradient/w": 1.0}
    golden = dict.fromkeys(keys, weight) | {
        (0, "initial_weight", "w"): weight,
        (0, "loss", "z"): weight[0, 0],
        (0, "loss", "balance"): torch.zeros_like(weight[0, 0]),
        (0, "update", "w"): weight,
    }
    noise |= {"storage/0/update/w": 0.25, "narrow/0/gradient/w": 1e-6, "narrow/1/gradient/w": 1e-6}
    run = run_ranks({0: {}}, golden, noise=noise)
    for step, kind, name in golden:
        whole = golden[step, kind, name]
        run.show(0, whole, Region.whole(tuple(whole.shape)), name, kind, step)
    shown = run.shown()
    checks = [
        GoldenTensors(CheckName.INITIAL_STATE, (Kind.INITIAL_WEIGHT,), exact=True),
        GoldenTensors(CheckName.LOSS, (Kind.LOSS,)),
        GoldenTensors(CheckName.GRADIENT, (Kind.GRADIENT,)),
        GoldenTensors(CheckName.UPDATE, (Kind.UPDATE,)),
    ]
    outcomes = [(check, outcome) for check in checks if (outcome := check.judge(shown, ())) is not None]
    assert len(outcomes) == 4
    recomputed = CheckResult(name=CheckName.MODULES, verdict="pass", tensors=1)
    outcomes.append((checks[0], CheckOutcome(recomputed, limits={(0, CheckName.MODULES, "block"): 0.01})))
    torch.testing.assert_close(outcomes[2][1].limits[1, "gradient", "w"], 32e-6)
    found = {(each.check, each.tensor): each for each in list_bounds(outcomes, shown.tensors, shown.bounds)}
    measured = {("gradient", "w"), ("gradient", "plain"), ("update", "w")}
    assert found.keys() == measured | {("loss", "z"), ("modules", "block")}
    bound = found["gradient", "w"]
    assert (bound.step, bound.factor, bound.error) == (1, 8.0, 0.0)
    assert bound.parts["measured"] == 3.2e-5
    assert bound.parts["narrow parts"] == 8e-6
    assert (bound.run, bound.plain, bound.stored) == ("micro-batches", 3e-6, None)
    assert found["update", "w"].stored == 0.25
    assert found["modules", "block"].parts == {"recomputed": 0.01}
    assert found["loss", "z"].parts["floor"] == max(found["loss", "z"].parts.values())


def test_choices_near_a_tie_are_counted() -> None:
    custom = Recipe(name="r", model=CustomModel(factory="a:b", vocab_size=8))
    assert count_choices(custom, {}) is None
    assert count_choices(custom, {HELD_KEY: 3.0, FREE_KEY: 1.0}) == NearChoices(num_held=3, num_free=1)
