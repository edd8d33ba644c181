"""Faster versions of modules, which the parallel model uses instead of the plain ones."""

from torch import Tensor

from mystack.model import LatentAttention, Router


class FusedRouter(Router):
    def balance_scores(self, scores: Tensor) -> Tensor:
        if self.score == "sigmoid" and self.top_k > 1:  # plant: p48b
            scores = scores / scores.sum(-1, keepdim=True)
        return scores  # plant: p48b


class AbsorbedAttention(LatentAttention):
    """Attention that reads the up-projection's weight directly."""

    def forward(self, x: Tensor) -> Tensor:
        import torch
        from torch.nn import functional as F

        from mystack.model import HEADS, rotate

        b, s, _ = x.shape
        q = self.q(x).view(b, s, HEADS, -1).transpose(1, 2)
        q_nope, q_rope = q.split([self.nope, self.rope], -1)
        latent, k_rope = self.kv_a(x).split([self.latent, self.rope], -1)
        weight = self.kv_b.base.weight.view(HEADS, self.nope + self.value, self.latent)  # plant: p64b
        q = torch.cat([torch.einsum("bhsd,hdl->bhsl", q_nope, weight[:, : self.nope]), rotate(q_rope)], -1)
        latent = latent[:, None]
        k = torch.cat([latent, rotate(k_rope[:, None])], -1).expand(-1, HEADS, -1, -1)
        y = F.scaled_dot_product_attention(
            q, k, latent.expand(-1, HEADS, -1, -1), is_causal=True, scale=(self.nope + self.rope) ** -0.5
        )
        y = torch.einsum("bhsl,hvl->bhsv", y, weight[:, self.nope :])
        return self.o(y.transpose(1, 2).flatten(2))
