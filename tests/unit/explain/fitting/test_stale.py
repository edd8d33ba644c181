"""Modules that compute with weights of the previous step: all of their weights, or one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from wrong_tensors import draw, make_origin

from moeverify.explain.fitting import stale
from moeverify.faults.setting import make_case
from moeverify.train.assemble import assemble_single

CPU = torch.device("cpu")
MODULE = "layers.0.attention.o_proj"
RECIPE = make_case("stale", model={"attention_bias": True}).recipe


def load(program: Any, golden: None, step: int) -> None:
    """Load the weights of a step, as from a golden; they differ between steps."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for weight in program.model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize(
    ("steps", "is_stale"),
    [
        ({"weight": 1, "bias": 1}, True),
        ({"weight": 1, "bias": 2}, True),
        ({"weight": 2, "bias": 1}, True),
        ({"weight": 0, "bias": 2}, False),
        ({"weight": 2, "bias": 0}, False),
    ],
)
def test_old_weights_are_told_from_older_ones(
    monkeypatch: pytest.MonkeyPatch, steps: dict[str, int], is_stale: bool
) -> None:
    monkeypatch.setattr(stale, "load_weights", load)
    program = assemble_single(RECIPE, CPU, compute="float64")
    module = program.model.get_submodule(MODULE)
    used = {}
    for name, step in steps.items():
        load(program, None, step)
        used[name] = module.get_parameter(name).detach().clone()
    x = draw(2, 5, module.get_parameter("weight").shape[1])
    output = torch.nn.functional.linear(x, used["weight"], used["bias"])
    _, inputs = make_origin(draw(*output.shape, seed=1), output, module=MODULE)
    origin = replace(inputs.origins["forward"], input=x)
    assert stale.explains_stale(RECIPE, None, 3, origin, CPU) is is_stale  # type: ignore[arg-type]
