"""Rotary position embedding from explicit positions.

Letters: B rows, S tokens, N heads, D head_dim.
Source: Su et al. 2021, "RoFormer", equation 34, with the halves of a head paired instead of neighbours, as
in `rotate_half` of Hugging Face transformers, models/llama/modeling_llama.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moeverify.cases.attention import Yarn
from moeverify.model.precision import widen
from moeverify.seams import seam


@seam
def compute_rotation(
    positions: Tensor, head_dim: int, theta: float, yarn: Yarn | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine (B, S, 1, D/2) in float64 for each position (B, S) and frequency.

    Always float64: a float32 angle at position 100,000 is already wrong in the third digit.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    frequencies = theta**-exponents
    if yarn is not None:
        frequencies = stretch(frequencies, theta, yarn)
    angles = (positions.to(torch.float64).unsqueeze(-1) * frequencies).unsqueeze(-2)
    if yarn is None:
        return angles.cos(), angles.sin()
    scale = magnify(yarn, yarn.mscale) / magnify(yarn, yarn.mscale_all_dim)
    return angles.cos() * scale, angles.sin() * scale


def stretch(frequencies: Tensor, theta: float, yarn: Yarn) -> Tensor:
    """Return the frequencies (D/2) under YaRN: high ones unchanged, low ones divided by the factor.

    Frequencies that turn between `beta_slow` and `beta_fast` times within the original length are blended
    linearly. The ends of that range are rounded to whole frequency indices.

    Source: Peng et al. 2023, "YaRN" (arXiv 2309.00071), section 3.2, with the rounding of its authors'
    code.
    """
    head_dim = 2 * len(frequencies)

    def find(turns: float) -> float:
        return head_dim * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(find(yarn.beta_fast)), 0)
    high = min(math.ceil(find(yarn.beta_slow)), head_dim - 1)
    width = high - low or 0.001
    number = torch.arange(len(frequencies), dtype=torch.float64, device=frequencies.device)
    slow = ((number - low) / width).clamp(0, 1)
    return frequencies / yarn.factor * slow + frequencies * (1 - slow)


def magnify(yarn: Yarn, mscale: float) -> float:
    """Return m(mscale) = 0.1 mscale ln(factor) + 1 (YaRN, equation 22, with DeepSeek's coefficient)."""
    return 0.1 * mscale * math.log(yarn.factor) + 1.0


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return x (B, S, N, D) with each pair (d, d + R/2) of its first R channels rotated, in the dtype of x.

    The rotation has R/2 angles; R is D unless the rotary embedding turns a part of each head.
    """
    wide = widen(x.dtype)
    cos, sin = (part.to(wide) for part in rotation)
    half = cos.shape[-1]
    first, second, rest = torch.split(x.to(wide), [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)


def rotate_neighbours(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return x (B, S, N, D) with each pair (2d, 2d + 1) rotated by its angle, in the dtype of x.

    DeepSeek's weights use this order. Source: RoFormer, equation 34, as written there.
    """
    wide = widen(x.dtype)
    cos, sin = (part.to(wide) for part in rotation)
    first, second = x.to(wide).reshape(*x.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.flatten(-2).to(x.dtype)
