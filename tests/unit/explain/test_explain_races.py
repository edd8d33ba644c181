"""Races count where a wrong result depends on them, or where all results happen to be right."""

from __future__ import annotations

import pytest
import torch
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


def differentiate(x: Tensor, y: Tensor, z: Tensor, case: str) -> Tensor:
    """Return a gradient; in some cases a buffer of the forward pass is written to, which autograd does not see."""
    leaf, buffer = x.clone().requires_grad_(), y.clone()
    if case == "holds a gradient":
        seed = (leaf.detach() * 2.0).sin()
        out = buffer.requires_grad_() * 3.0
        buffer.data.copy_(seed)
        return torch.autograd.grad(out, buffer, buffer.detach())[0].cos()
    out = (leaf * buffer).sin()
    if case == "overwritten":
        buffer.data.copy_(z)
    elif case == "written alike":
        buffer.data.copy_(y)
    return torch.autograd.grad(out.sum(), leaf)[0]


@pytest.mark.parametrize(
    ("case", "is_found"), [("overwritten", True), ("written alike", False), ("holds a gradient", False)]
)
def test_a_write_to_memory_that_a_backward_pass_needs_is_found(case: str, is_found: bool) -> None:
    inputs = {"x": make(4, 5), "y": make(4, 5, seed=1), "z": make(4, 5, seed=2)}
    program, one = (
        record_call(lambda x, y, z, case=each: differentiate(x, y, z, case), None, **inputs)
        for each in (case, "")
    )
    causes = Explainer([program], one, 0, ()).explain(10.0)
    assert ("overwritten" in [cause.known for cause in causes]) is is_found
    if is_found:
        (written,), launch = causes[0].ops, causes[0].launch
        assert launch is not None
        assert (program.ops[written[1]].short, program.ops[launch[1]].short) == ("copy_", "mul")
