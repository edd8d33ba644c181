"""The float64 replacement of torch's grouped product, against the kernel in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moeverify.train.wide_operators import WideOperators, multiply_groups

GROUPS = torch.tensor([4, 4, 16], dtype=torch.int32)  # the second group is empty


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1]))


@pytest.mark.parametrize(
    ("left", "right", "offs"),
    [
        ((16, 8), (3, 8, 12), GROUPS),
        ((3, 12, 8), (8, 16), GROUPS),
        ((12, 16), (16, 8), GROUPS),
        ((3, 12, 8), (3, 8, 16), None),
    ],
    ids=["rows", "columns", "inner", "batched"],
)
def test_every_form_multiplies_and_differentiates_as_the_kernel(
    left: tuple[int, ...], right: tuple[int, ...], offs: Tensor | None
) -> None:
    gradients = []
    products = []
    for dtype in (torch.float32, torch.float64):
        operands = [draw(*shape).to(dtype).requires_grad_() for shape in (left, right)]
        with WideOperators():
            product = torch.nn.functional.grouped_mm(*operands, offs=offs)
            (product * draw(*product.shape).to(dtype)).sum().backward()
        products.append(product)
        gradients.append([operand.grad for operand in operands])
    assert products[1].dtype == torch.float64
    torch.testing.assert_close(products[1].float(), products[0], rtol=1e-5, atol=1e-5)
    for narrow, wide in zip(*gradients, strict=True):
        assert narrow is not None
        assert wide is not None
        torch.testing.assert_close(wide.float(), narrow, rtol=1e-5, atol=1e-5)


def test_rows_behind_the_last_group_are_zero() -> None:
    product = multiply_groups(draw(20, 8).double(), draw(3, 8, 12).double(), offs=GROUPS)
    assert product.shape == (20, 12)
    assert not product[16:].any()
    assert product[:16].any()


def test_other_dtypes_go_to_the_kernel() -> None:
    operands = draw(16, 8), draw(3, 8, 12)
    with WideOperators():
        inside = torch._grouped_mm(*operands, offs=GROUPS)
    assert torch.equal(inside, torch._grouped_mm(*operands, offs=GROUPS))


def test_attention_without_key_heads_is_an_error_and_does_not_end_the_process() -> None:
    query, key = torch.zeros(1, 2, 3, 4, dtype=torch.float64), torch.zeros(1, 0, 3, 4, dtype=torch.float64)
    with WideOperators(), pytest.raises(RuntimeError, match="without key heads"):
        torch.nn.functional.scaled_dot_product_attention(query, key, key)


def test_attention_may_be_called_by_keywords() -> None:
    query = draw(1, 2, 3, 4).double()
    with WideOperators():
        found = torch.nn.functional.scaled_dot_product_attention(query=query, key=query, value=query)
    assert torch.equal(found, torch.nn.functional.scaled_dot_product_attention(query, query, query))


@pytest.mark.parametrize("backward", [Tensor.backward, torch.autograd.backward], ids=["method", "function"])
def test_a_checkpointed_product_is_computed_again_in_the_backward_pass(
    backward: Callable[[Tensor], None],
) -> None:
    left, right = draw(16, 8).double().requires_grad_(), draw(3, 8, 12).double()

    def multiply(left: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(left, right, offs=GROUPS).sin()

    with WideOperators():
        backward(checkpoint(multiply, left, use_reentrant=False).sum())
        (expected,) = torch.autograd.grad(multiply(left).sum(), left)
    assert left.grad is not None
    assert torch.equal(left.grad, expected)
