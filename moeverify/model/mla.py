"""Multi-head latent attention: keys and values of all heads are projected from one narrow latent per token.

Letters: B rows, S tokens, H hidden, N heads, Dn and Dr widths of a head without and with position, Dv of a
value.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and equations 37 to 47. The norms are placed as in
Hugging Face transformers, models/deepseek_v3/modeling_deepseek_v3.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moeverify.cases.attention import MLA
from moeverify.cases.schema import ReferenceModel
from moeverify.model.attention import Core, causal_core
from moeverify.model.norm import RMSNorm
from moeverify.model.param_access import View, identity
from moeverify.model.precision import Factory
from moeverify.model.rope import compute_rotation, magnify, rotate_neighbours

LATENT_EPS = 1e-6
"""Epsilon of the latent norms: DeepSeek's code always uses this default, whatever the other norms use."""


class LatentAttention(nn.Module):
    """Attention with latents for queries and for keys and values, their norms, core and output projection.

    A query or key head has Dn elements without position and Dr with it. The key's Dr elements depend only
    on the token and are shared by all heads. The number of heads follows from the projections' outputs, so
    the module also works on a shard of whole heads. `core` may be replaced. `share` receives the key's
    shared part before every head uses it. It may be replaced, for example by a function that sums the
    gradient over ranks with other heads.
    """

    def __init__(self, spec: ReferenceModel, mla: MLA, factory: Factory) -> None:
        super().__init__()
        self.sizes = mla
        self.rope_theta = spec.rope_theta
        self.yarn = spec.yarn
        self.core: Core = causal_core
        self.share: View = identity
        width = spec.num_heads * (mla.qk_nope + mla.qk_rope)
        bias = spec.attention_bias
        self.q_proj = self.q_a_proj = self.q_a_norm = self.q_b_proj = None
        if mla.q_lora == 0:
            self.q_proj = nn.Linear(spec.hidden, width, bias=False, **factory)
        else:
            self.q_a_proj = nn.Linear(spec.hidden, mla.q_lora, bias=bias, **factory)
            self.q_a_norm = RMSNorm(mla.q_lora, LATENT_EPS, factory)
            self.q_b_proj = nn.Linear(mla.q_lora, width, bias=False, **factory)
        self.kv_a_proj = nn.Linear(spec.hidden, mla.kv_lora + mla.qk_rope, bias=bias, **factory)
        self.kv_a_norm = RMSNorm(mla.kv_lora, LATENT_EPS, factory)
        kv_width = spec.num_heads * (mla.qk_nope + mla.v_head)
        self.kv_b_proj = nn.Linear(mla.kv_lora, kv_width, bias=False, **factory)
        output_bias = bias and spec.attention_bias_scope == "all"
        self.o_proj = nn.Linear(spec.num_heads * mla.v_head, spec.hidden, bias=output_bias, **factory)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the attention output (B, S, H) for x (B, S, H) at positions (B, S)."""
        sizes = self.sizes
        rotation = compute_rotation(positions, sizes.qk_rope, self.rope_theta, self.yarn)
        q = self._project_queries(x).view(*x.shape[:-1], -1, sizes.qk_nope + sizes.qk_rope)
        q_nope, q_rope = torch.split(q, [sizes.qk_nope, sizes.qk_rope], dim=-1)
        latent, k_rope = torch.split(self.kv_a_proj(x), [sizes.kv_lora, sizes.qk_rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_norm(latent)).view(*x.shape[:-1], -1, sizes.qk_nope + sizes.v_head)
        k_nope, v = torch.split(kv, [sizes.qk_nope, sizes.v_head], dim=-1)
        k_rope = rotate_neighbours(self.share(k_rope).unsqueeze(-2), rotation)
        q = torch.cat([q_nope, rotate_neighbours(q_rope, rotation)], dim=-1)
        k = torch.cat([k_nope, k_rope.expand(*k_nope.shape[:-1], -1)], dim=-1)
        heads = self.core(self._scale(q), k, v, positions)
        output: Tensor = self.o_proj(heads.flatten(-2))
        return output

    def _project_queries(self, x: Tensor) -> Tensor:
        if self.q_proj is not None:
            plain: Tensor = self.q_proj(x)
            return plain
        assert self.q_a_proj is not None
        assert self.q_a_norm is not None
        assert self.q_b_proj is not None
        latent: Tensor = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        return latent

    def _scale(self, q: Tensor) -> Tensor:
        """Return the queries times YaRN's scale of the scores: a core divides only by sqrt(Dn + Dr)."""
        if self.yarn is None or self.yarn.mscale_all_dim == 0.0:
            return q
        return q * magnify(self.yarn, self.yarn.mscale_all_dim) ** 2
