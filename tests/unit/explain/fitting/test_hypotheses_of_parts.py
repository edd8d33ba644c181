"""Hypotheses about parts: slices, groups of parameters, added values, counters, other layers, wrong tokens.

Each is tested on a new bug of its class, and on a bug of another class that it must refuse.
"""

from __future__ import annotations

import torch
from wrong_tensors import draw, examine, find_hypothesis, make_inputs, make_sharded, make_tensor

from moeverify.explain.fitting.axes import Axes
from moeverify.explain.fitting.counter_tests import count_right_alike
from moeverify.parallel.regions.region import Region
from moeverify.results.factor import Source
from moeverify.results.operation import (
    Stepped,
    Unmoved,
)

TP = Axes({"tp": [[0, 1]]}, [Source(name="tp", size=2)])
SQUARES = {"layers.0.norm.weight": 3.0, "layers.1.norm.weight": 4.0, "layers.0.up.weight": 12.0}


# slices along a dim


# values that were added


# counters, copies, losses, ranks


def test_a_counter_of_steps_is_read_as_a_number() -> None:
    tensor = make_tensor(torch.tensor(3.0), torch.tensor(1.0), name="up.weight.step", kind="optimizer_state")
    outcome = examine("step_counter", tensor)
    assert outcome.explanation is not None
    assert outcome.explanation.operation == Stepped(num_steps=-2)
    moment = make_tensor(draw(3), draw(3, seed=1), name="up.weight.exp_avg", kind="optimizer_state")
    assert not find_hypothesis("step_counter").applies(moment, make_inputs(moment))


def test_an_update_that_stands_still_on_one_rank_names_it() -> None:
    expected = draw(4, 3)
    still = make_sharded(expected, expected[:2], torch.zeros(2, 3, dtype=torch.float64), kind="update")
    outcome = examine("unmoved", still)
    assert outcome.explanation is not None
    assert outcome.explanation.operation == Unmoved(ranks=(1,))
    others = make_sharded(expected, 2 * expected[:2], torch.zeros(2, 3, dtype=torch.float64), kind="update")
    assert examine("unmoved", others).explanation is None


# counter-tests


def test_an_axis_whose_other_gradients_are_right_is_not_confirmed() -> None:
    expected = draw(4, 3)
    tensor = make_tensor(expected, 2 * expected, 2 * expected, name="layers.0.up.weight")
    regions = {name: {0: Region.whole((4, 3)), 1: Region.whole((4, 3))} for name in SQUARES}
    inputs = make_inputs(tensor, axes=TP, regions=regions)
    explanation = examine("one_factor", tensor, inputs).explanation
    assert explanation is not None
    (seen,) = count_right_alike(explanation, [tensor], inputs)
    assert (seen.axis, seen.num_right, seen.num_alike) == ("tp", 2, 3)
    alone = make_inputs(tensor, axes=TP, regions={tensor.name: regions[tensor.name]})
    assert list(count_right_alike(explanation, [tensor], alone)) == []
