"""Races count where a wrong result depends on them, or where all results happen to be right."""

from __future__ import annotations

import pytest
from recordings import list_ops, make, record_call
from torch import Tensor

from moeverify.explain.explain import Explainer
from moeverify.explain.program import Race


@pytest.mark.parametrize(
    ("shift", "is_used", "is_found"), [(0.0, True, True), (0.0, False, False), (1.0, True, True)]
)
def test_a_race_is_found_whether_the_recorded_run_was_right_or_not(
    shift: float, is_used: bool, is_found: bool
) -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        y.exp().cos()
        return (x.exp() + shift).sin()

    inputs = {"x": make(4, 5), "y": make(4, 5, seed=1)}
    program = record_call(run, **inputs)
    unused, used = list_ops(program, "exp")
    op = used if is_used else unused
    program.races.append(Race(op.number, op.number + 1, "read", True))
    one = record_call(lambda x, y: x.exp().sin(), **inputs)
    causes = Explainer([program], one, 0, ()).explain(10.0)
    assert ("race" in [cause.known for cause in causes]) is is_found
