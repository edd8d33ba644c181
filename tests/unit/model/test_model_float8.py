"""Linear layers in float8: the rounding of operands, the affected products, and the converted layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from moeverify.cases.presets import PRESETS
from moeverify.cases.schema import ReferenceModel
from moeverify.model.float8 import Float8Linear, convert, list_layers, round_to_float8, scale_of
from moeverify.model.float8_scaling import FLOAT8
from moeverify.model.transformer import Transformer

E4M3 = torch.float8_e4m3fn
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def test_the_largest_element_fills_the_range() -> None:
    largest = torch.tensor([0.0, 3.0, 448.0, 449.0], dtype=torch.float64)
    assert scale_of(largest, E4M3, power_of_two=False)[2] == 1.0
    assert scale_of(largest, E4M3, power_of_two=True)[1:].tolist() == [128.0, 1.0, 0.5]
    assert scale_of(largest, E4M3, power_of_two=True)[0].isfinite()
    exact = 448.0 / 2.0 ** torch.arange(-20, 20, dtype=torch.float64)
    assert torch.equal(scale_of(exact, E4M3, power_of_two=True).double(), 448.0 / exact)


def test_rounding_leaves_four_digits_of_two_relative_to_the_slice() -> None:
    x = torch.tensor(
        [[1.0, 1.0625, 1.1875, 448.0], [2.0**-20, 0.0, -(2.0**-12), 2.0**-11]], dtype=torch.float64
    )
    by_row = round_to_float8(x, E4M3, 1, power_of_two=True)
    assert by_row[0].tolist() == [1.0, 1.0, 1.25, 448.0], "half way, it goes to the even one"
    assert by_row[1].tolist() == x[1].tolist()
    in_all = round_to_float8(x, E4M3, None, power_of_two=True)
    assert in_all[1].tolist() == [0.0, 0.0, 0.0, 0.0], "far below the largest element of all nothing is left"


@pytest.mark.parametrize("name", ["rowwise", "rowwise_with_gw_hp", "tensorwise"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_torchao(name: str, dtype: torch.dtype) -> None:
    library = pytest.importorskip("torchao.float8")
    from torchao.float8.float8_linear import Float8Linear as Theirs

    torch.manual_seed(0)
    config = replace(library.Float8LinearConfig.from_recipe_name(name), emulate=True)
    linear = nn.Linear(48, 32, dtype=dtype)
    # Powers of two round alike, except far below the largest: so columns differ by more than e4m3 can hold.
    linear.weight.data *= torch.logspace(-6, 0, 48, dtype=dtype)
    x = torch.randn(4, 8, 48, dtype=dtype) * torch.logspace(-3, 2, 8, dtype=dtype).unsqueeze(-1)
    gradient = torch.randn(4, 8, 32, dtype=dtype)
    found = []
    for layer in (Float8Linear(linear, FLOAT8.find(name)), Theirs.from_float(linear, config)):
        inputs = x.clone().requires_grad_()
        linear.weight.grad = None
        outputs = layer(inputs)
        outputs.backward(gradient)
        assert inputs.grad is not None
        assert linear.weight.grad is not None
        found.append((outputs.detach(), inputs.grad, linear.weight.grad.clone()))
    plain = (linear(x).detach(), gradient @ linear.weight.detach())
    # torchao's emulation multiplies in float32 for any dtype; sums are in another order.
    close = 2e-6 if dtype != torch.bfloat16 else 2.0**-8
    for own, theirs in zip(*found, strict=True):
        assert ((own - theirs).norm() / theirs.norm()).item() < close
    for own, wide in zip(found[0], plain, strict=False):
        assert 0.01 < ((own - wide).norm() / wide.norm()).item() < 0.1, "nothing was rounded"


def test_the_layers_are_the_dense_projections_with_sizes_for_kernels() -> None:
    fields = {**PRESETS["stress"], "ffn_hidden": 40}
    model = Transformer(ReferenceModel(preset="stress", **fields), device="meta")
    names = {name for name, _, _ in list_layers(model)}
    assert {name.split(".", 2)[2] for name in names} == {
        *(f"attention.{each}_proj" for each in "qkvo"),
        *(f"moe.shared.{each}_proj" for each in ("gate", "up", "down")),
    }, "a dense layer of width 40, routers, experts, gates and head stay as they are"
    convert(model, "rowwise")
    kinds = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    assert kinds == names
    assert len(list(model.parameters())) == len(
        list(Transformer(ReferenceModel(preset="stress", **fields), device="meta").parameters())
    )
