"""Linear layers in float8 on one device, written from the definition: no kernel, and nothing of torchao.

What torchao computes under a layout is compared with this. The numbers that come out of a rounding to float8 are kept
in the dtype of the recipe, or in float32 where that is narrower, and multiplied there: in float64 two devices then
differ by the order of their sums alone.

Letters: T tokens, K width of the inputs, N width of the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moeverify.model.float8_scaling import FLOAT8, UNIT, Format, Scaling
from moeverify.model.mlp import MLP
from moeverify.model.precision import widen

FORMATS: Mapping[Format, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LEAST = 1e-12
"""The least largest element that a scale is made for: an operand of zeros has one too."""


def scale_of(largest: Tensor, dtype: torch.dtype, *, power_of_two: bool) -> Tensor:
    """Return what operands with these largest elements are multiplied by, in float32, to fill the range of a dtype.

    With `power_of_two` the largest power of two that is not above it. Shape: any, that of `largest`.
    """
    scale = (torch.finfo(dtype).max / largest.to(torch.float64).clamp(min=LEAST)).to(torch.float32)
    if not power_of_two:
        return scale
    exponent = torch.frexp(scale).exponent  # scale = m * 2 ** exponent, m in [0.5, 1)
    return torch.ldexp(torch.full_like(scale, 0.5), exponent)


def round_to_float8(x: Tensor, dtype: torch.dtype, dim: int | None, *, power_of_two: bool) -> Tensor:
    """Return x with the numbers that float8 leaves of it, in its own dtype, but at least float32.

    Each slice along `dim` has a scale; None for one scale in all. Shape: that of x.
    """
    size = x.abs()
    largest = size.amax() if dim is None else size.amax(dim=dim, keepdim=True)
    scale = scale_of(largest, dtype, power_of_two=power_of_two)
    most = torch.finfo(dtype).max
    rounded = (x.to(torch.float32) * scale).clamp(-most, most).to(dtype)
    wide = widen(x.dtype)
    return rounded.to(wide) / scale.to(wide)


class _Linear(torch.autograd.Function):
    """x (T, K), weight (N, K) in; x weight^T (T, N) out, each product with operands in float8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scaling = scaling
        inputs = _round(x, "e4m3", 1 if scaling.rows else None, scaling)
        weights = _round(weight, "e4m3", 1 if scaling.rows else None, scaling)
        return (inputs @ weights.t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,), (x, weight), scaling = gradients, ctx.saved_tensors, ctx.scaling
        outputs = _round(gradient, scaling.gradient, 1 if scaling.rows else None, scaling)
        weights = _round(weight, "e4m3", 0 if scaling.weight_rows else None, scaling)
        of_inputs = (outputs @ weights).to(x.dtype)
        if scaling.wide_weight_gradient:
            return of_inputs, gradient.t() @ x, None
        outputs = _round(gradient, scaling.gradient, 0 if scaling.rows else None, scaling)
        inputs = _round(x, "e4m3", 0 if scaling.rows else None, scaling)
        return of_inputs, (outputs.t() @ inputs).to(weight.dtype), None


def _round(x: Tensor, name: Format, dim: int | None, scaling: Scaling) -> Tensor:
    return round_to_float8(x, FORMATS[name], dim, power_of_two=scaling.power_of_two)


class Float8Linear(nn.Linear):
    """A linear layer whose products are those of float8 numbers; weight and bias are kept as they were."""

    def __init__(self, linear: nn.Linear, scaling: Scaling) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.scaling = scaling

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs (..., N) for inputs (..., K)."""
        rows: Any = _Linear.apply(input.reshape(-1, input.shape[-1]), self.weight, self.scaling)  # type: ignore[no-untyped-call]
        outputs: Tensor = rows.view(*input.shape[:-1], -1)
        return outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)


def list_layers(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return (name, parent, attribute) of the layers that float8 is for: projections of attention and of dense MLPs.

    Shared experts are dense; routers, routed experts, gates, embedding and head are not among them, nor is a layer
    with a size that is no multiple of `UNIT`.
    """
    from moeverify.model.attention import Attention
    from moeverify.model.mla import LatentAttention

    return [
        (f"{prefix}.{name}", module, name)
        for prefix, module in model.named_modules()
        if isinstance(module, Attention | LatentAttention | MLP)
        for name, child in module.named_children()
        if isinstance(child, nn.Linear) and not (child.in_features % UNIT or child.out_features % UNIT)
    ]


def convert(model: nn.Module, float8: str) -> None:
    """Put this module's own layers in the place of those that float8 is for, in place."""
    if float8 == "none":
        return
    for _, parent, name in list_layers(model):
        setattr(parent, name, Float8Linear(getattr(parent, name), FLOAT8.find(float8)))
