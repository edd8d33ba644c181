"""The decoder-only transformer, as a whole or as a pipeline stage.

Letters: B rows, S tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from moeverify.cases.schema import ReferenceModel
from moeverify.model.attention import Attention
from moeverify.model.mla import LatentAttention
from moeverify.model.mlp import MLP
from moeverify.model.moe import build_moe
from moeverify.model.norm import Norm, build_norm
from moeverify.model.precision import Factory
from moeverify.model.router import RouterStats


class ModelOutput(NamedTuple):
    """logits (B, S, V), or hidden states (B, S, H) of a stage without head; one RouterStats per MoE layer."""

    logits: Tensor
    routers: tuple[RouterStats, ...]


def mix_tokens(
    x: Tensor,
    positions: Tensor,
    attention_norm: nn.Module,
    attention: nn.Module,
    ffn_norm: nn.Module,
) -> tuple[Tensor, Tensor]:
    """Return x (B, S, H) after attention and residual, and the normalized x for the feed-forward part."""
    x = x + attention(attention_norm(x), positions)
    return x, ffn_norm(x)


class TransformerBlock(nn.Module):
    """Attention followed by a dense or mixture-of-experts feed-forward block, each with norm and residual."""

    def __init__(self, spec: ReferenceModel, layer: int, *, experts: str, factory: Factory) -> None:
        super().__init__()
        self.attention_norm = build_norm(spec.norm, spec.hidden, spec.norm_eps, factory)
        self.attention: Attention | LatentAttention = (
            Attention(spec, factory) if spec.mla is None else LatentAttention(spec, spec.mla, factory)
        )
        self.ffn_norm = build_norm(spec.norm, spec.hidden, spec.norm_eps, factory)
        self.mlp: MLP | None = None
        self.moe: nn.Module | None = None
        self.mix = mix_tokens
        bias = spec.mlp_bias
        if spec.moe is None or layer < spec.num_dense_layers:
            self.mlp = MLP(
                spec.hidden, spec.ffn_hidden, activation=spec.activation, bias=bias, factory=factory
            )
        else:
            self.moe = build_moe(spec.hidden, spec.moe, mlp_bias=bias, backend=experts, factory=factory)

    def forward(
        self, x: Tensor, positions: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, RouterStats | None]:
        """Return the next hidden states (B, S, H), and the router's sums in a MoE layer."""
        x, normed = self.mix(x, positions, self.attention_norm, self.attention, self.ffn_norm)
        if self.mlp is not None:
            return x + self.mlp(normed), None
        assert self.moe is not None
        y, stats = self.moe(normed, valid)
        return x + y, stats


class TiedHead(nn.Module):
    """The head of a model with tied embedding: it uses the embedding's weight and has no parameter."""

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self._embed = (embed,)  # in a tuple, so that it does not become a submodule

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, S, V) of x (B, S, H)."""
        return functional.linear(x, self._embed[0].weight)


class Transformer(nn.Module):
    """The reference model. Its parameters are NaN until `moeverify.model.init` or a checkpoint fills them.

    `layers` is keyed by the layer's number in the whole model. A pipeline stage is created by deleting
    layers and setting `embed`, or `norm` and `lm_head`, to None. The last stage of a tied model keeps
    `embed`.

    The sizes of `spec` must satisfy the rules that are checked for a case.

    Raises: CaseError when the expert backend does not support the dtype or the sizes.
    """

    def __init__(
        self,
        spec: ReferenceModel,
        *,
        experts: str = "loop",
        dtype: torch.dtype = torch.float64,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__()
        self.spec = spec
        # Build on meta and allocate at the end. torch's own initialization would be slow for a large model,
        # advance the global random state, and hide parameters that nothing has filled.
        factory: Factory = {"dtype": dtype, "device": torch.device("meta")}
        embed = nn.Embedding(spec.vocab_size, spec.hidden, **factory)
        self.embed: nn.Embedding | None = embed
        self.layers = nn.ModuleDict(
            {
                str(layer): TransformerBlock(spec, layer, experts=experts, factory=factory)
                for layer in range(spec.num_layers)
            }
        )
        self.norm: Norm | None = build_norm(spec.norm, spec.hidden, spec.norm_eps, factory)
        self.lm_head: nn.Module | None = (
            TiedHead(embed)
            if spec.tie_embedding
            else nn.Linear(spec.hidden, spec.vocab_size, bias=False, **factory)
        )
        if torch.device(device).type != "meta":
            self.to_empty(device=device)
            self._erase()

    @torch.no_grad()
    def _erase(self) -> None:
        for parameter in self.parameters():
            parameter.fill_(torch.nan)
        for buffer in self.buffers():
            buffer.zero_()

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, valid: Tensor | None = None
    ) -> ModelOutput:
        """Return the logits and the statistics for the auxiliary losses.

        Floating-point `tokens` are the hidden states (B, S, H) from the previous stage. Without
        `positions`, each row counts from 0. Without `valid`, every token counts in the routers' sums.

        Shapes: tokens, positions (B, S) int64, valid (B, S) bool; logits (B, S, V).

        Raises: TypeError when a stage without embedding gets token ids.
        """
        if tokens.is_floating_point():
            x = tokens
        elif self.embed is not None:
            x = self.embed(tokens)
        else:
            raise TypeError("this stage has no embedding: give it the hidden states of the stage before")
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        routers = []
        for block in self.layers.values():
            x, stats = block(x, positions, valid)
            if stats is not None:
                routers.append(stats)
        if self.norm is not None:
            x = self.norm(x)
        if self.lm_head is not None:
            x = self.lm_head(x)
        return ModelOutput(x, tuple(routers))
