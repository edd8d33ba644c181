"""The parts of bounds that a result carries: the widest step of each tensor, unless the floor decides."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moeverify.parallel.regions.region import Region
from moeverify.results.checks import CheckName, Kind
from moeverify.verification.checks.golden_tensors import GoldenTensors
from moeverify.verification.worker.error_map import list_bounds


def test_the_widest_step_counts_and_exact_or_floor_bounds_are_left_out(
    run_ranks: Callable, weight: Tensor
) -> None:
    keys = [(step, "gradient", name) for step in (0, 1, 2) for name in ("w", "plain")]
    noise = {"0/gradient/w": 1e-6, "1/gradient/w": 4e-6, "2/gradient/w": 2e-6}
    golden = dict.fromkeys(keys, weight) | {
        (0, "initial_weight", "w"): weight,
        (0, "loss", "z"): weight[0, 0],
    }
    run = run_ranks(
        {0: {}}, golden, noise={**noise, "narrow/0/gradient/w": 1e-6, "narrow/1/gradient/w": 1e-6}
    )
    for step, kind, name in golden:
        whole = golden[step, kind, name]
        run.show(0, whole, Region.whole(tuple(whole.shape)), name, kind, step)
    shown = run.shown()
    checks = [
        GoldenTensors(CheckName.INITIAL_STATE, (Kind.INITIAL_WEIGHT,), exact=True),
        GoldenTensors(CheckName.LOSS, (Kind.LOSS,)),
        GoldenTensors(CheckName.GRADIENT, (Kind.GRADIENT,)),
    ]
    outcomes = [(check, outcome) for check in checks if (outcome := check.judge(shown, ())) is not None]
    assert len(outcomes) == 3
    torch.testing.assert_close(outcomes[2][1].limits[1, "gradient", "w"], 32e-6)
    found = {(each.check, each.tensor): each for each in list_bounds(outcomes, shown.tensors, 8.0)}
    assert found.keys() == {("gradient", "w")} | {("gradient", "plain")}
    bound = found["gradient", "w"]
    assert (bound.step, bound.factor, bound.error) == (1, 8.0, 0.0)
    assert bound.parts["measured"] == 3.2e-5
    assert bound.parts["narrow parts"] == 8e-6
