"""Recomputation of blocks: the operators recomputed in the backward pass, with unchanged results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moeverify.cases.schema import Recompute
from moeverify.parallel.recompute import apply_recompute

B, S = 2, 8


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def train(model: Any, which: Recompute) -> tuple[list[Tensor | None], Counter[str]]:
    if which:
        apply_recompute(model, which)
    tokens = torch.arange(B * S).reshape(B, S) % 16
    output = model(tokens)
    with Counting() as counting:
        output.logits.square().sum().backward()
    return [parameter.grad for parameter in model.parameters()], counting.counts


@pytest.mark.parametrize("which", [True, "selective"])
def test_recomputation_changes_no_gradient(
    make_spec: Callable[..., Any], make_model: Callable[..., Any], which: Recompute
) -> None:
    expected, _ = train(make_model(make_spec()), False)
    found, _ = train(make_model(make_spec()), which)
    for gradient, right in zip(found, expected, strict=True):
        assert (gradient is None) == (right is None)
        assert right is None or torch.equal(gradient, right)


def test_selective_recomputation_makes_no_matrix_product_again(
    make_spec: Callable[..., Any], make_model: Callable[..., Any]
) -> None:
    of_none, of_all, of_some = (
        train(make_model(make_spec()), which)[1] for which in (False, True, "selective")
    )
    products = [sum(counts[name] for name in ("mm", "bmm", "addmm")) for counts in (of_none, of_all, of_some)]
    assert products[0] == products[2] < products[1]
    assert of_none["rsqrt"] < of_some["rsqrt"] == of_all["rsqrt"]  # norms are made again
