"""Rotary position embedding from explicit positions.

Letters: B rows, S tokens, N heads, D head_dim.
Source: Su et al. 2021, "RoFormer", equation 34, with the halves (not the neighbours) of a head paired, as in
`rotate_half` of Hugging Face transformers, models/llama/modeling_llama.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeverify.model.precision import widen


def compute_rotation(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine (B, S, 1, D/2) in float64 of the angle of each position (B, S) and frequency.

    float64 always: a float32 angle at position 100,000 is already wrong in the third digit.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = (positions.to(torch.float64).unsqueeze(-1) * theta**-exponents).unsqueeze(-2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return x (B, S, N, D) with each pair (d, d + D/2) turned by its angle, in the dtype of x."""
    wide = widen(x.dtype)
    cos, sin = (part.to(wide) for part in rotation)
    first, second = x.to(wide).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
