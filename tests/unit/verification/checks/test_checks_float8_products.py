"""Float8 products recomputed from a layer's operands: right ones agree, and wrong ones are classified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

from moeverify.cases.presets import PRESETS
from moeverify.cases.schema import ReferenceModel
from moeverify.faults.setting import make_case
from moeverify.model.float8_scaling import FLOAT8
from moeverify.model.transformer import Transformer
from moeverify.parallel.float8 import apply_float8
from moeverify.report.words.run import word_finding
from moeverify.results.finding import Finding
from moeverify.verification.checks.base import ShownTensors
from moeverify.verification.checks.float8 import Float8, Float8Watch
from moeverify.verification.checks.float8_products import bound_cuts

torchao = pytest.importorskip("torchao")

LAYER = "layers.0.attention.o_proj"
MM = torch.ops.aten.mm.default
CHOSEN = [
    ("tensorwise", torch.float32),
    ("tensorwise", torch.bfloat16),
    ("rowwise", torch.float32),
    ("rowwise", torch.bfloat16),
    ("rowwise_with_gw_hp", torch.float64),
]


def run_layer(float8: str, dtype: torch.dtype, num_tokens: int = 200) -> tuple[Finding, ...]:
    """Return the findings of a step of one layer as text."""
    torch.manual_seed(0)
    model = Transformer(ReferenceModel(preset="stress", **PRESETS["stress"]), dtype=dtype, device="meta")
    apply_float8(model, float8, torch.device("cpu"), dtype)
    model.to_empty(device="cpu")
    layer: Any = model.get_submodule(LAYER)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    watch = Float8Watch(model, power_of_two=FLOAT8.find(float8).power_of_two)
    try:
        watch.begin_step(0)
        inputs = torch.randn(2, num_tokens // 2, layer.in_features, dtype=dtype, requires_grad=True)
        outputs = layer(inputs)
        outputs.backward(torch.randn_like(outputs))
    finally:
        watch.close()
    report = watch.report()
    assert report.num_products == (2 if float8 == "rowwise_with_gw_hp" else 3)
    case = make_case("x", recipe={"float8": float8, "precision": "bfloat16"}, tp=2)
    coordinates = {rank: {"tp": rank} for rank in range(2)}
    shown = ShownTensors(coordinates, {}, cast(Any, None), case=case, golden_names={})
    outcome = Float8().judge(shown, [report])
    assert outcome is not None
    return tuple(
        word_finding(each) for each in outcome.findings if each.facts.source in ("numbers", "product")
    )


@pytest.mark.parametrize(("float8", "dtype"), CHOSEN)
def test_what_is_right_is_right_in_every_dtype(float8: str, dtype: torch.dtype) -> None:
    assert run_layer(float8, dtype) == ()


@pytest.fixture
def multiply_otherwise() -> Iterator[Callable[[Any], None]]:
    """Return a function that replaces torchao's product until the test is over."""
    from moeverify.parallel.float8 import _import_torchao

    _import_torchao()
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

    original = FLOAT8_OPS_TABLE[MM]

    def do(change: Any) -> None:
        FLOAT8_OPS_TABLE[MM] = lambda op, args, kwargs=None: change(original, op, args)

    yield do
    FLOAT8_OPS_TABLE[MM] = original


def leave_out_last(original: Any, op: Any, args: Any) -> Any:
    """Leave the last term of each sum out, as wrong padding does."""
    left, right = args
    last = left.to_original_precision()[:, -1:] @ right.to_original_precision()[-1:]
    return original(op, args) - last


def scale_once_more(original: Any, op: Any, args: Any) -> Any:
    """Divide by the scale of the left operand twice."""
    return original(op, args) / args[0]._scale


@pytest.mark.parametrize(("float8", "dtype"), CHOSEN)
@pytest.mark.parametrize("bug", [leave_out_last, scale_once_more])
def test_a_wrong_product_is_told(
    multiply_otherwise: Callable[[Any], None], bug: Any, float8: str, dtype: torch.dtype
) -> None:
    multiply_otherwise(bug)
    (found,) = run_layer(float8, dtype)
    assert (found.facts.source, found.tensor, found.code) == ("product", LAYER, "precision")
    assert "differ from the product of its float8 operands" in found.cause
    assert set(found.facts.operands) >= {"output", "grad_input"}
    assert found.error > found.bound


@pytest.mark.parametrize(("float8", "dtype"), CHOSEN)
def test_numbers_that_are_rounded_otherwise_are_told(
    monkeypatch: pytest.MonkeyPatch, float8: str, dtype: torch.dtype
) -> None:
    from torchao.float8 import float8_training_tensor as library

    nearest = library.to_fp8_saturated

    def toward_zero(x: torch.Tensor, wanted: torch.dtype) -> torch.Tensor:
        rounded = nearest(x, wanted)
        too_far = rounded.to(torch.float32).abs() > x.abs()
        return torch.where(
            too_far, nearest(x * 0.9375, wanted).to(torch.float32), rounded.to(torch.float32)
        ).to(wanted)

    monkeypatch.setattr(library, "to_fp8_saturated", toward_zero)
    (found,) = run_layer(float8, dtype)
    assert (found.facts.source, found.code, found.bound) == ("numbers", "precision", 0.0)
    assert "to float8 numbers that do not follow from their scales" in found.cause


def multiply_like_a_tensor_core(one: torch.Tensor, other: torch.Tensor, at_once: int = 32) -> torch.Tensor:
    """Sum products (m, k) x (k, n) in groups, truncated 13 bits below the largest product of the group."""
    total = torch.zeros(len(one), other.shape[1], dtype=torch.float64)
    for first in range(0, len(other), at_once):
        rows = slice(first, first + at_once)
        addends = torch.cat([one[:, rows, None] * other[None, rows], total[:, None]], dim=1)
        unit = 2.0 ** (addends.abs().amax(1).log2().floor() - 13.0)
        total = ((addends / unit[:, None]).trunc() * unit[:, None]).sum(1)
    return total


def make_operands(kind: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return operands (8, length) and (length, 64) whose sums lose bits, each pair in another way."""
    one = torch.randn(8, length, dtype=torch.float64)
    other = torch.randn(length, 64, dtype=torch.float64)
    if kind == "positive":
        one, other = one.abs(), other.abs()
    elif kind == "one is large":
        one[:, length // 3] *= 100.0
    elif kind == "first up, then down":
        one, other = one.abs(), other.abs()
        one[:, length // 2 :] *= -1.0
    return tuple(x.to(torch.float8_e4m3fn).to(torch.float64) for x in (one, other))  # type: ignore[return-value]


@pytest.mark.parametrize("length", [64, 1024, 4096])
@pytest.mark.parametrize("kind", ["random", "positive", "one is large", "first up, then down"])
def test_what_a_tensor_core_loses_is_allowed(kind: str, length: int) -> None:
    torch.manual_seed(0)
    one, other = make_operands(kind, length)
    exact = one @ other
    terms = (one[:, :, None] * other[None]).cumsum(1).abs().amax(1)
    allowed = bound_cuts(one, other, terms)
    lost = (multiply_like_a_tensor_core(one, other) - exact).abs()
    assert bool((lost <= allowed).all())
    # It is no larger than needed: near the largest observed loss, and below the effect of a lost row.
    assert float((lost / allowed).amax()) > 0.05
    if kind == "random":
        typical = float((one[:, :1] * other[:1]).abs().mean()) * length**0.5
        assert float(allowed.median()) < 0.2 * typical
