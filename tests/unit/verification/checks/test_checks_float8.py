"""Scales of float8 operands: those that torchao used against those of the operands, on one or more ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from moeverify.cases.presets import PRESETS
from moeverify.cases.schema import ReferenceModel
from moeverify.faults.setting import make_case
from moeverify.model.transformer import Transformer
from moeverify.parallel.float8 import apply_float8
from moeverify.report.words.run import word_finding
from moeverify.results.finding import Finding
from moeverify.verification.checks.base import ShownTensors
from moeverify.verification.checks.float8 import Float8, Float8Report, Float8Watch, Operand, find_largest

LAYER = "layers.0.attention.o_proj"
OTHERS = ("layers.0.attention.q_proj", LAYER, "layers.0.mlp.up_proj")
FAIR = Operand(0, (LAYER, "input", 0), "float8_e4m3fn", (7.0,), (64.0,))


def judge(*reports: Float8Report, float8: str = "tensorwise") -> tuple[Finding, ...]:
    """Return the findings as text."""
    case = make_case("x", recipe={"float8": float8, "precision": "bfloat16"}, tp=2)
    coordinates = {rank: {"tp": rank} for rank in range(2)}
    shown = ShownTensors(coordinates, {}, cast(Any, None), case=case, golden_names={})
    outcome = Float8().judge(shown, reports)
    assert outcome is not None
    return tuple(map(word_finding, outcome.findings))


def report(*operands: Operand) -> Float8Report:
    """Return the report of a rank that has seen all of its layers."""
    return Float8Report(OTHERS, frozenset(OTHERS), 10, operands)


def test_largest_elements_are_those_of_what_has_one_scale() -> None:
    x = torch.arange(-24.0, 24.0).view(2, 8, 3)
    assert find_largest(x, None).tolist() == [24.0]
    assert find_largest(x, -1).tolist() == [max(abs(3.0 * n - 24), abs(3.0 * n - 22)) for n in range(16)]
    assert find_largest(x[0], 0).tolist() == [24.0, 23.0, 22.0]
    assert len(find_largest(torch.rand(1000, 4), 1)) <= 16


def test_what_is_cut_has_the_scale_of_all_its_parts() -> None:
    part = replace(FAIR, ranks=(0, 1), axis="tp")
    smaller = replace(part, largest=(3.5,))
    assert judge(report(part), report(smaller)) == ()
    (found,) = judge(report(part), report(replace(smaller, used=(128.0,))))
    assert (found.ranks, found.code, found.tensor) == ((1,), "missing-reduction", LAYER)
    assert found.place is not None
    assert found.place.axes == ("tp",)
    assert "not reduced over tp" in found.cause


def test_a_scale_of_the_step_before_is_named() -> None:
    stale = replace(FAIR, step=1, used=(448.0 / 5.0,), before=(5.0,))
    (found,) = judge(report(stale), report())
    assert (found.step, found.ranks, found.code) == (1, (0,), "stale")
    assert "of the step before" in found.cause


def test_a_scale_that_nobody_has_is_told_without_a_source() -> None:
    (found,) = judge(report(replace(FAIR, used=(64.001,))), report())
    assert "do not match their largest elements" in found.cause
    (found,) = judge(report(replace(FAIR, used=(1.0,), other="layers.0.mlp.up_proj weight")), report())
    assert "by the largest elements of another operand" in found.cause
    assert any("the scale of layers.0.mlp.up_proj weight" in line for line in found.evidence)


def test_layers_with_the_same_bug_are_one_finding() -> None:
    stale = replace(FAIR, used=(448.0 / 5.0,), before=(5.0,))
    other = replace(stale, key=("layers.2.mlp.up_proj", "grad_output", 0), used=(448.0 / 6.0,), before=(6.0,))
    (found,) = judge(report(stale), report(other))
    assert (found.tensor, found.ranks, found.facts.num_layers) == ("the model", (0, 1), 2)
    assert found.cause == (
        "the model scales gradients of outputs and inputs by the largest elements of the step before"
    )
    assert "89.6 instead of 64 for inputs" in found.evidence[1]


def test_a_power_of_two_may_be_either_of_two_where_rounding_decides() -> None:
    least = 448.0 * (1 + 2.0**-25)  # its scale is slightly below 1
    for used in (1.0, 0.5):
        assert judge(report(replace(FAIR, largest=(least,), used=(used,))), float8="rowwise") == ()
    assert judge(report(replace(FAIR, largest=(449.0,), used=(1.0,))), float8="rowwise") != ()


def test_an_operand_that_is_not_finite_is_left_to_other_checks() -> None:
    assert judge(report(replace(FAIR, largest=(float("nan"),), used=(float("nan"),))), report()) == ()
    (found,) = judge(report(replace(FAIR, used=(float("inf"),))), report())
    assert found.error == 1.0


def test_layers_that_nobody_saw_in_float8_are_one_finding() -> None:
    (found,) = judge(Float8Report(OTHERS, frozenset(OTHERS[:2]), 5, ()), report())
    assert (found.tensor, found.ranks) == ("layers.0.mlp", (0,))
    assert "computes without float8" in found.cause


@pytest.fixture
def watched() -> Iterator[tuple[Any, Float8Watch]]:
    """Return a layer of torchao and its watch."""
    pytest.importorskip("torchao")
    model = Transformer(
        ReferenceModel(preset="stress", **PRESETS["stress"]), dtype=torch.float32, device="meta"
    )
    apply_float8(model, "tensorwise", torch.device("cpu"), torch.float32)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    watch = Float8Watch(model, power_of_two=False)
    yield model.get_submodule(LAYER), watch
    watch.close()


def test_all_operands_of_a_step_are_looked_at(watched: tuple[Any, Float8Watch]) -> None:
    layer, watch = watched
    for step in range(2):
        watch.begin_step(step)
        layer(torch.randn(4, 64, requires_grad=True)).sum().backward()
    watch.close()
    seen = watch.report()
    assert seen.seen == {LAYER}
    assert seen.num_operands == 2 * 6, "two of each product"
    assert seen.operands == ()


def test_an_operand_that_was_changed_before_it_was_scaled_is_found(watched: tuple[Any, Float8Watch]) -> None:
    from torchao.float8 import float8_scaling_utils

    layer, watch = watched
    watch.begin_step(0)
    round_operand = float8_scaling_utils.hp_tensor_and_scale_to_float8
    scale = torch.tensor(3.0)
    round_operand(torch.ones(4, 32), scale, torch.float8_e4m3fn, layer.linear_mm_config)
    watch.close()
    (operand,) = watch.report().operands
    assert (operand.key, operand.used, operand.largest) == ((LAYER, "input", 0), (3.0,), (1.0,))
    assert float8_scaling_utils.hp_tensor_and_scale_to_float8 is not round_operand, "it looks no longer"
