"""Recomputation of one router's backward pass in float64, compared with its actual gradient.

The gradient of a router's weight has three parts: through the combine weights, on which the token losses
depend, and through the two sums of the balance and z losses. The gradients at these points and the router's
own input determine each part. The actual gradient must be their sum, up to rounding:

    dW = combine + balance + z,   each (E, H)

Padding tokens do not contribute to the two losses. Their would-be contributions are fitted as parts that
must be absent.

Rounding to a narrow dtype changes an element by at most half a unit, up as often as down. The standard
error of a part's coefficient therefore decreases with the number of elements. Rounding in the router's
float32 arithmetic is counted in full. Letters: N tokens, E experts, k choices, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.cases.schema import MoE
from moeverify.model.precision import widen
from moeverify.results.facts import Term
from moeverify.verification.checks.router import Scored
from moeverify.verification.checks.wide_parts import split_passes, split_wide

PARTS: tuple[tuple[Term, float], ...] = (
    ("combine", 1.0),
    ("balance", 1.0),
    ("z", 1.0),
    ("balance padding", 0.0),
    ("z padding", 0.0),
)
"""Possible parts of a gradient, with their coefficients in the right one."""
_SUMMED = 2.0**-40  # remainder of a cancelling sum of squares in float64


@dataclass(frozen=True)
class RouterInputs:
    """Inputs of a router in a pass, and the gradients that it received.

    Shapes: weight (E, H) and bias (E) float64, x (N, H), valid (N), ids (N, k). `of_weights` (N, k),
    `of_probabilities` (N, E) and `of_z` () are the gradients of the combine weights, of each token's
    probabilities and of the sum of z.
    """

    spec: MoE
    weight: Tensor
    bias: Tensor | None
    x: Tensor
    valid: Tensor
    ids: Tensor
    of_weights: Tensor
    of_probabilities: Tensor
    of_z: Tensor


def measure_backward(inputs: RouterInputs, actual: Tensor) -> Tensor:
    """Return the input of `RouterFit.of` as one tensor (P + 1, 2P + 1) for P parts, without synchronization.

    Shape: actual (E, H), the gradient of the weight in its own dtype.
    """
    parts, allowed = _recompute(inputs)
    wide = actual.to(torch.float64)
    # Half a unit in the last place of each element. frexp returns mantissas in [0.5, 1).
    power = torch.ldexp(torch.ones_like(wide), torch.frexp(wide).exponent - 1)
    half = 0.5 * torch.finfo(actual.dtype).eps * torch.where(wide == 0.0, 0.0, power)
    flat = torch.stack([part.flatten() for part in parts])
    # A uniform error of at most h has the variance h^2 / 3.
    variance = half.flatten().square() / 3.0 + allowed.flatten().square()
    left = (wide - sum(times * part for (_, times), part in zip(PARTS, parts, strict=True))).abs()
    ratio = (left / (half + allowed + torch.finfo(actual.dtype).tiny)).nan_to_num(torch.inf).amax()
    # The normal equations of the fit, and the covariance of their right side.
    gram, noise = flat @ flat.T, (flat * variance) @ flat.T
    products = (flat @ wide.flatten()).unsqueeze(1)
    rows = torch.cat([gram, noise, products], dim=1)
    last = torch.zeros_like(rows[:1])
    last[0, :3] = torch.stack([ratio, wide.square().sum(), variance.sum()])
    return torch.cat([rows, last])


@dataclass(frozen=True)
class RouterFit:
    """Coefficient of each part in the gradient of a router's weight, with its standard error.

    A coefficient is None if it cannot be determined. `ratio` is the largest error of an element over its
    rounding bound, relative to the right coefficients. `is_whole` means that the fitted coefficients leave
    only rounding.
    """

    coefficients: tuple[tuple[float, float] | None, ...]
    ratio: float
    is_whole: bool = False

    @classmethod
    def of(cls, numbers: Tensor) -> RouterFit:
        """Return the fit of the numbers from `measure_backward`."""
        num_parts = len(PARTS)
        ratio, total, allowed = numbers[num_parts, :3].tolist()
        if not bool(torch.isfinite(numbers[:num_parts]).all()):
            # Non-finite parts cannot be fitted. If the parts are finite, the actual gradient is not.
            is_known = bool(torch.isfinite(numbers[:num_parts, :num_parts]).all())
            return cls((None,) * num_parts, ratio if is_known else 0.0)
        gram, noise = numbers[:num_parts, :num_parts], numbers[:num_parts, num_parts:-1]
        products = numbers[:num_parts, -1]
        sizes = gram.diagonal().sqrt()
        used = [number for number in range(len(PARTS)) if float(sizes[number]) > 0.0]
        if not used:
            return cls((None,) * num_parts, ratio)
        # Columns of norm 1: the parts differ by orders of magnitude.
        scale = sizes[used]
        inverse = torch.linalg.pinv(gram[used][:, used] / torch.outer(scale, scale), hermitian=True)
        values = inverse @ (products[used] / scale) / scale
        spread = inverse @ (noise[used][:, used] / torch.outer(scale, scale)) @ inverse
        errors = spread.diagonal().clamp_min(0.0).sqrt() / scale
        found: list[tuple[float, float] | None] = [None] * num_parts
        for place, number in enumerate(used):
            found[number] = float(values[place]), float(errors[place])
        # |actual - parts @ values|^2, from the sums alone.
        left = total - 2.0 * float(values @ products[used]) + float(values @ gram[used][:, used] @ values)
        return cls(tuple(found), ratio, left <= 4.0 * allowed + _SUMMED * total)


def _recompute(inputs: RouterInputs) -> tuple[Tensor, Tensor]:
    """Return the parts (P, E, H) in float64, and a bound (E, H) on the router's arithmetic error."""
    weight = inputs.weight
    parts = torch.zeros(len(PARTS), *weight.shape, dtype=torch.float64, device=weight.device)
    allowed = torch.zeros_like(parts[0])
    unit = 0.5 * torch.finfo(widen(inputs.x.dtype)).eps
    # Single operators, sums over E experts, and sums over N tokens in blocks, whose errors add like a random walk.
    rounding = unit * (16.0 + 2.0 * weight.shape[0] + 4.0 * len(inputs.x) ** 0.5)
    tensors = (inputs.x, inputs.valid, inputs.ids, inputs.of_weights, inputs.of_probabilities)
    for x, valid, ids, of_weights, of_probabilities in split_passes(weight.shape[0], *tensors):
        scored = Scored.compute(inputs.spec, x, weight, inputs.bias)
        kept = valid.unsqueeze(-1).to(torch.float64)
        through_weights = _combine(inputs.spec, scored.scores, ids, of_weights.to(torch.float64))
        through_sum = _balance(inputs.spec, scored.scores, of_probabilities.to(torch.float64))
        combine, size = _through_scores(inputs.spec, scored.scores, *through_weights)
        balance, balance_size = _through_scores(inputs.spec, scored.scores, *through_sum)
        # The derivative of logsumexp^2 is 2 * logsumexp * softmax.
        z = (
            2.0
            * scored.logits.logsumexp(-1, keepdim=True)
            * scored.logits.softmax(-1)
            * inputs.of_z.to(torch.float64)
        )
        pad = 1.0 - kept
        of_logits = torch.cat([combine, balance * kept, z * kept, balance * pad, z * pad], dim=1)
        errors = (size + balance_size + z.abs()) * (4.0 * scored.relative + rounding)
        for tokens, wide in split_wide(x):
            parts += (of_logits[tokens].T @ wide).view_as(parts)
            allowed += errors[tokens].T @ wide.abs()
    return parts, allowed


def _combine(spec: MoE, scores: Tensor, ids: Tensor, of_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the scores (N, E) through the combine weights, and its absolute terms summed."""
    chosen, scaled = scores.gather(-1, ids), of_weights * spec.route_scale
    gradient, size = scaled, scaled.abs()
    if spec.renormalize:
        total = chosen.sum(dim=-1, keepdim=True) + 1e-20
        gradient = scaled / total - (scaled * chosen).sum(dim=-1, keepdim=True) / total.square()
        size = scaled.abs() / total + (scaled.abs() * chosen).sum(dim=-1, keepdim=True) / total.square()
    zero = torch.zeros_like(scores)
    return zero.scatter_add(-1, ids, gradient), zero.scatter_add(-1, ids, size)


def _balance(spec: MoE, scores: Tensor, of_probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the scores (N, E) through the probabilities, and its absolute terms summed."""
    if spec.score != "sigmoid":
        return of_probabilities, of_probabilities.abs()
    total = scores.sum(dim=-1, keepdim=True)
    probabilities = scores / total
    inner = (of_probabilities * probabilities).sum(dim=-1, keepdim=True)
    outer = (of_probabilities.abs() * probabilities).sum(dim=-1, keepdim=True)
    return (of_probabilities - inner) / total, (of_probabilities.abs() + outer) / total


def _through_scores(spec: MoE, scores: Tensor, gradient: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the logits (N, E) from the scores' gradient, and its absolute terms summed."""
    if spec.score == "sigmoid":
        # The slope is at most the score, which bounds the sizes.
        slope = scores * (1.0 - scores)
        return gradient * slope, size * scores
    # Softmax: p * (g - sum of g * p).
    inner = (gradient * scores).sum(dim=-1, keepdim=True)
    outer = (size * scores).sum(dim=-1, keepdim=True)
    return scores * (gradient - inner), scores * (size + outer)
