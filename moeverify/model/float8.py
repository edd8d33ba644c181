"""Float8 linear layers on one device, written from the definition without kernels or torchao.

They are the reference for torchao under a layout. Values are rounded to float8, stored in the recipe's
dtype (float32 or wider) and multiplied there. In float64 two devices then differ only by the order of their
sums.

Letters: T tokens, K width of the inputs, N width of the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moeverify.model.float8_scaling import FLOAT8, UNIT, Format, OperandScaling
from moeverify.model.mlp import MLP
from moeverify.model.precision import widen

FORMATS: Mapping[Format, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LEAST = 1e-12
"""Lower bound of the largest element in a scale, so that an operand of zeros has a finite scale."""


def scale_of(largest: Tensor, dtype: torch.dtype, *, power_of_two: bool) -> Tensor:
    """Return the float32 scales that map operands with these largest elements to the full range of a dtype.

    With `power_of_two`, scales are rounded down to a power of two. The result has the shape of `largest`.
    """
    scale = (torch.finfo(dtype).max / largest.to(torch.float64).clamp(min=LEAST)).to(torch.float32)
    if not power_of_two:
        return scale
    exponent = torch.frexp(scale).exponent  # scale = m * 2 ** exponent, m in [0.5, 1)
    return torch.ldexp(torch.full_like(scale, 0.5), exponent)


def round_to_float8(x: Tensor, dtype: torch.dtype, dim: int | None, *, power_of_two: bool) -> Tensor:
    """Return x rounded to the values of a float8 dtype, in its own dtype or float32 if that is wider.

    Each slice along `dim` has its own scale; with None there is one scale. The result has the shape of x.
    """
    size = x.abs()
    largest = size.amax() if dim is None else size.amax(dim=dim, keepdim=True)
    scale = scale_of(largest, dtype, power_of_two=power_of_two)
    most = torch.finfo(dtype).max
    rounded = (x.to(torch.float32) * scale).clamp(-most, most).to(dtype)
    wide = widen(x.dtype)
    return rounded.to(wide) / scale.to(wide)


class _Linear(torch.autograd.Function):
    """Linear function: x (T, K), weight (N, K) -> x weight^T (T, N), with float8 operands in each product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: OperandScaling) -> Tensor:
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


def _round(x: Tensor, name: Format, dim: int | None, scaling: OperandScaling) -> Tensor:
    return round_to_float8(x, FORMATS[name], dim, power_of_two=scaling.power_of_two)


class Float8Linear(nn.Linear):
    """A linear layer with float8 products; weight and bias keep their dtype."""

    def __init__(self, linear: nn.Linear, scaling: OperandScaling) -> None:
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
    """Return (name, parent, attribute) of the float8 layers: projections of attention and of dense MLPs.

    They include shared experts. They exclude routers, routed experts, gates, embedding and head, and layers
    with a size that is not a multiple of `UNIT`.
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
    """Replace the layers of `list_layers` by float8 layers, in place."""
    if float8 == "none":
        return
    for _, parent, name in list_layers(model):
        setattr(parent, name, Float8Linear(getattr(parent, name), FLOAT8.find(float8)))
