"""The dense feed-forward block, also used as the shared expert."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from moeverify.model.precision import Factory


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) for `swiglu`; down(gelu(up(x))) with the exact gelu for `gelu`.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", equation 6.
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        *,
        activation: Literal["swiglu", "gelu"],
        bias: bool,
        factory: Factory,
    ) -> None:
        super().__init__()
        gated = activation == "swiglu"
        self.gate_proj = nn.Linear(hidden, ffn_hidden, bias=bias, **factory) if gated else None
        self.up_proj = nn.Linear(hidden, ffn_hidden, bias=bias, **factory)
        self.down_proj = nn.Linear(ffn_hidden, hidden, bias=bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, in the shape (..., hidden) of x."""
        inner = (
            functional.gelu(self.up_proj(x))
            if self.gate_proj is None
            else functional.silu(self.gate_proj(x)) * self.up_proj(x)
        )
        output: Tensor = self.down_proj(inner)
        return output
