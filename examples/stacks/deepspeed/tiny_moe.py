"""A small model with DeepSpeed's experts, as a user's project would write it."""

from __future__ import annotations

import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

VOCABULARY, WIDTH, EXPERTS = 96, 32, 4


class Block(nn.Module):
    """A mixing layer, then experts, each with a residual connection."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
        # No token limit and no random choices: an expert's work must not depend on the layout.
        self.moe = MoE(
            WIDTH,
            expert,
            num_experts=EXPERTS,
            ep_size=ep_size,
            k=2,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (M, s, WIDTH) of the same shape."""
        hidden = hidden + torch.tanh(self.mix(hidden))
        output, _, _ = self.moe(self.norm(hidden))
        return hidden + output


class TinyMoe(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(ep_size), Block(ep_size))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (M, s, VOCABULARY) of tokens (M, s)."""
        logits: Tensor = self.head(self.blocks(self.embed(tokens)))
        return logits


def make_tiny_moe(ep_size: int) -> nn.Module:
    """Return the model with its experts over `ep_size` ranks."""
    return TinyMoe(ep_size)
