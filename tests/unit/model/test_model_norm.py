from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from moeverify.model.norm import LayerNorm, RMSNorm

FACTORY = {"dtype": torch.float64, "device": torch.device("cpu")}


def test_rms_norm_is_torchs(make_normal) -> None:
    norm, x = RMSNorm(6, 1e-2, FACTORY), make_normal(2, 3, 6)
    norm.weight.data = make_normal(6, seed=1)
    torch.testing.assert_close(
        norm(x), functional.rms_norm(x, (6,), norm.weight, 1e-2), rtol=1e-14, atol=1e-14
    )


def test_layer_norm_is_torchs(make_normal) -> None:
    norm, x = LayerNorm(6, 1e-2, FACTORY), make_normal(2, 3, 6)
    norm.weight.data, norm.bias.data = make_normal(6, seed=1), make_normal(6, seed=2)
    expected = functional.layer_norm(x, (6,), norm.weight, norm.bias, 1e-2)
    torch.testing.assert_close(norm(x), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_a_narrow_dtype_is_rounded_once(kind, make_normal) -> None:
    x = make_normal(4, 64).to(torch.bfloat16)
    narrow = kind(64, 1e-5, {**FACTORY, "dtype": torch.bfloat16})
    wide = kind(64, 1e-5, FACTORY)
    assert narrow(x).dtype == torch.bfloat16
    assert torch.equal(narrow(x), wide(x.double()).to(torch.bfloat16))


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_parameters_are_taken_through_the_view(kind, make_normal) -> None:
    norm, x = kind(6, 1e-5, FACTORY), make_normal(2, 6)
    for parameter in norm.parameters():
        parameter.data = make_normal(6, seed=1)
    once = norm(x)
    norm.view = lambda parameter: parameter * 3
    torch.testing.assert_close(norm(x), once * 3)
