"""Recomputation of float8 products: the numbers of the operands, and the sums of their products.

An operand must hold its elements times their scales, rounded to nearest, bit for bit. A product must be the
sum of the products of the dequantized operands, up to the rounding of that sum. Both use only the rank's
own tensors, neither the golden nor earlier steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeverify.model.precision import widen
from moeverify.results.facts import Float8Facts

MOST_ROWS, MOST_COLUMNS = 8, 64
"""Maximum number of evenly spaced rows and columns recomputed per product; for an operand, only rows."""

# Truncation of an addend in a kernel, relative to the largest value added at once, or to the sum so far.
# Hopper tensor cores align addends to the largest one and keep 13 bits below its leading bit (section 3.3.2 of
# arXiv 2412.19437). Later ones keep more.
_UNIT = 2.0**-13

# Deviations of a normal variable that are exceeded once in 5e8 elements.
_DEVIATIONS = 6.0

# Number of parts of equal length after which partial sums are examined.
_PARTS = 16

_PRODUCT = torch.ops.aten.mm.default

_ROLES = {
    ("input", "weight"): "output",
    ("grad_output", "weight"): "grad_input",
    ("grad_output", "input"): "grad_weight",
}


@dataclass(frozen=True)
class Float8Comparison:
    """Comparison of one operand or product, not yet read from the device.

    `numbers` (5,) holds the number of wrong elements, the number of compared ones, and the actual value,
    expected value and allowed error of the worst element.
    """

    layer: str
    role: str
    is_product: bool
    numbers: Tensor

    def find_wrong(self) -> Float8Facts | None:
        """Return facts about the wrong elements; None if there are none. Synchronizes with the device."""
        num_wrong, num_compared, actual, expected, allowed = self.numbers.tolist()
        if not num_wrong:
            return None
        return Float8Facts(
            layer=self.layer,
            operand=self.role,
            source="product" if self.is_product else "numbers",
            num_wrong=int(num_wrong),
            num_compared=int(num_compared),
            used=actual,
            wanted=expected,
            allowed=allowed,
        )


def compare_operand(layer: str, role: str, x: Tensor, rounded: Any) -> Float8Comparison:
    """Compare some rows of a torchao operand with x (..., n) times its scales, rounded again."""
    flat, data = x.reshape(-1, x.shape[-1]), rounded._data.reshape(-1, x.shape[-1])
    scale = rounded._scale.expand(x.shape).reshape(flat.shape)
    rows = _choose(len(flat), MOST_ROWS, x.device)
    most = torch.finfo(data.dtype).max
    # As torchao does: multiply in float32, saturate, round to nearest.
    expected = (flat[rows].to(torch.float32) * scale[rows]).clamp(-most, most).to(data.dtype)
    return Float8Comparison(
        layer, role, False, _measure(_pick(data, rows), _widen(expected), torch.zeros(()))
    )


@dataclass(frozen=True)
class SampledProduct:
    """Some elements of a float8 product, and their values recomputed from the operands.

    All tensors are (rows, columns), float64. `sizes` are sums of absolute products. `allowed` bounds the
    rounding error of the sums.
    """

    role: str
    actual: Tensor
    expected: Tensor
    sizes: Tensor
    allowed: Tensor


class ProductTap:
    """Hook on every product of torchao's layers on this rank, active until closed.

    Close several taps in reverse order. `layers` maps the id of a layer's options to its name: every layer
    has an options object of its own.
    """

    def __init__(self, layers: Mapping[int, str], hear: Callable[[str, SampledProduct], None]) -> None:
        from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

        self._layers, self._hear = layers, hear
        self._operators: dict[Any, Any] = FLOAT8_OPS_TABLE
        self._original = self._operators[_PRODUCT]
        self._operators[_PRODUCT] = self._multiply

    def close(self) -> None:
        """Remove the hook."""
        if self._operators[_PRODUCT] == self._multiply:
            self._operators[_PRODUCT] = self._original

    def _multiply(self, operator: Any, operands: Any, named: Any = None) -> Any:
        product = self._original(operator, operands, named)
        left, right = operands[:2]
        layer = self._layers.get(id(left._linear_mm_config))
        if layer is not None:
            with torch.no_grad():
                found = read_product(left, right, product)
            if found is not None:
                self._hear(layer, found)
        return product


def read_product(left: Any, right: Any, product: Tensor) -> SampledProduct | None:
    """Return some elements of a product (m, n) of operands (m, k) and (k, n), with recomputed values.

    Return None if the operands do not belong to a linear layer.
    """
    role = _ROLES.get((left._gemm_input_role.value, right._gemm_input_role.value))
    if role is None or not product.numel():
        return None
    rows = _choose(product.shape[0], MOST_ROWS, product.device)
    columns = _choose(product.shape[1], MOST_COLUMNS, product.device)
    # Dequantized operands (rows, k) and (columns, k): a scale multiplies before the rounding, and divides after it.
    one = _pick(left._data, rows) / _widen(left._scale.expand(left._data.shape)[rows])
    other = _pick(right._data.t(), columns) / _widen(right._scale.expand(right._data.shape).t()[columns])
    other = other.t()
    partial = _add_up(one, other)
    expected, sizes = partial[-1], one.abs() @ other.abs()
    # Operands are divided by their scales, multiplied and summed, with one rounding each in the
    # accumulation dtype.
    unit = (len(other) + 4) * 0.5 * torch.finfo(widen(product.dtype)).eps
    last = torch.finfo(product.dtype)
    allowed = unit * sizes + last.eps / 2.0 * expected.abs() + last.tiny
    if product.device.type != "cpu" and not left._linear_mm_config.output.emulate:
        allowed += bound_cuts(one, other, partial.abs().amax(0))
    return SampledProduct(role, _widen(product[rows][:, columns]), expected, sizes, allowed)


def bound_cuts(one: Tensor, other: Tensor, most: Tensor) -> Tensor:
    """Return a bound on the error of a tensor core in sums of products of (m, k) and (k, n). All float64.

    `most` (m, n) is the largest partial sum. Each of the k addends and each carried sum loses between 0 and
    1 unit toward zero. The mean loss is half a unit with the sign of the addend. The rest behaves like a
    sum of independent uniform variables.
    """
    # One carried sum for every 16 addends.
    num_addends = len(other) + len(other) // 16
    # No addend is larger than the root of the sum of all squares.
    largest = torch.maximum(most, (one.square() @ other.square()).sqrt())
    drift = 0.5 * (one.sign() @ other.sign()).abs()
    # A uniform variable of width 1 has the variance 1/12.
    spread = _DEVIATIONS * math.sqrt(num_addends / 12.0)
    return _UNIT * largest * (drift + spread)


def compare_product(layer: str, product: SampledProduct) -> Float8Comparison:
    """Compare some elements of a product with the values recomputed from its operands."""
    return Float8Comparison(
        layer, product.role, True, _measure(product.actual, product.expected, product.allowed)
    )


def list_wrong(seen: list[Float8Comparison]) -> Iterator[Float8Facts]:
    """Yield facts about each wrong operand or product. Synchronizes with the device."""
    for each in seen:
        facts = each.find_wrong()
        if facts is not None:
            yield facts


def _choose(length: int, most: int, device: torch.device) -> Tensor:
    return torch.arange(0, length, max(1, -(-length // most)), device=device)


def _add_up(one: Tensor, other: Tensor) -> Tensor:
    """Return cumulative sums (parts, m, n) of products of (m, k) and (k, n) along k; the last is whole."""
    length = -(-len(other) // _PARTS)
    parts = [one[:, at : at + length] @ other[at : at + length] for at in range(0, len(other), length)]
    return torch.stack(parts).cumsum(0)


def _pick(data: Tensor, rows: Tensor) -> Tensor:
    """Return rows of float8 numbers, widened. Float8 dtypes cannot be indexed on all devices."""
    return _widen(data.view(torch.uint8)[rows].view(data.dtype))


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.float64)


def _measure(actual: Tensor, expected: Tensor, allowed: Tensor) -> Tensor:
    """Return the `numbers` of `Float8Comparison`. Two NaNs count as equal."""
    allowed = allowed.to(actual).expand(actual.shape)
    error = (actual - expected).abs()
    is_right = (error <= allowed) | (actual.isnan() & expected.isnan()) | (actual == expected)
    # NaN in place of a number is the largest error.
    worst = torch.where(is_right, -1.0, torch.nan_to_num(error - allowed, nan=torch.inf)).argmax()
    count = torch.tensor(float(actual.numel()), dtype=actual.dtype, device=actual.device)
    picked = (each.reshape(-1)[worst] for each in (actual, expected, allowed))
    return torch.stack([(~is_right).sum().to(actual.dtype), count, *picked])
