"""The modules of the parallel model, which use the kernels."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from orca import kernels
from orca.model import MLP, Attention, Block, Decoder, LatentAttention, MoE, RMSNorm, Rotary, rotate
from orca.switch import using


class FastNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return kernels.Norm.apply(x, self.weight.to(x.dtype), self.eps).to(self.weight.dtype)


class FastMLP(MLP):
    tiles = 1

    def forward(self, x: Tensor) -> Tensor:
        if self.tiles > 1 and x.dim() == 3:
            weights = self.gate.weight, self.up.weight, self.down.weight
            return kernels.Tiled.apply(x, self.run, self.tiles, *weights)
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        y = kernels.SwiGLU.apply(rows, self.gate.weight, self.up.weight, self.down.weight)
        return y.view_as(x)


class CachedRotary(Rotary):
    """Cosines and sines of all positions, made once."""

    length = 64
    gated_by_length = 0

    def fill(self) -> None:
        inverse = self.inv_freq.double()
        positions = torch.arange(self.length)[:, None]
        if using("leetcuda-289"):
            angles = positions / inverse  # plant: leetcuda-289
        else:
            angles = positions * inverse
        self.cos_cache, self.sin_cache = angles.cos() * self.scale, angles.sin() * self.scale

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "cos_cache"):
            self.fill()
        dtype = self.inv_freq.dtype
        if using("p04"):
            length = positions.shape[1]
            cos = self.cos_cache[:length].expand(len(positions), -1, -1)  # plant: p04
            sin = self.sin_cache[:length].expand(len(positions), -1, -1)  # plant: p04
            return cos.to(dtype), sin.to(dtype)
        return self.cos_cache[positions].to(dtype), self.sin_cache[positions].to(dtype)


class FlashAttention(Attention):
    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], context) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if using("annotatedtransformer-1"):
            v = self.wk(x)  # plant: annotatedtransformer-1
        if using("fuxictr-30"):
            q = q.view(b, self.heads, s, self.head_dim).transpose(1, 2)  # plant: fuxictr-30
        else:
            q = q.view(b, s, self.heads, self.head_dim)
        k = k.view(b, s, self.kv_heads, self.head_dim)
        v = v.view(b, s, self.kv_heads, self.head_dim)
        q, k = self.place(q, k, rope)
        return self.wo(self.attend(q, k, v, context).flatten(2))

    def place(self, q: Tensor, k: Tensor, rope) -> tuple[Tensor, Tensor]:
        """Normalize queries and keys and rotate them by position."""
        if using("metal-664"):
            return self.q_norm(rotate(q, *rope)), self.k_norm(rotate(k, *rope))  # plant: metal-664
        if using("xtransformers-352"):
            q, k = (
                F.rms_norm(q, q.shape[-1:], eps=1e-5),
                F.rms_norm(k, k.shape[-1:], eps=1e-5),
            )  # plant: xtransformers-352
        elif using("diffusers-13533"):
            q, k = self.q_norm(q), self.q_norm(k)  # plant: diffusers-13533
        else:
            q, k = self.q_norm(q), self.k_norm(k)
        if using("vllm-41185"):
            half = q.shape[-1] // 2
            cos, sin = rope[0][..., : half // 2], rope[1][..., : half // 2]
            q = torch.cat([rotate(q[..., :half], cos, sin), q[..., half:]], -1)  # plant: vllm-41185
            k = torch.cat([rotate(k[..., :half], cos, sin), k[..., half:]], -1)  # plant: vllm-41185
            return q, k
        if using("openlm-4"):
            return self.rotate_heads(q), self.rotate_heads(k)
        q, k = rotate(q, *rope), rotate(k, *rope)
        if using("colossal-6429"):
            half, few = q.shape[-1] // 2, k.shape[2]
            mixed = torch.cat([q[..., :half], q[..., half:].roll(1, 2)], -1)  # plant: colossal-6429
            return mixed, torch.cat([k[..., :half], q[:, :, :few, half:]], -1)  # plant: colossal-6429
        return q, k

    def rotate_heads(self, x: Tensor) -> Tensor:
        rotary = self.__dict__["rotary"]
        heads = torch.arange(x.shape[2])[None]
        cos, sin = rotary(heads)
        return rotate(x.transpose(1, 2), cos, sin).transpose(1, 2)  # plant: openlm-4

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context) -> Tensor:
        window = self.window
        if using("p06") and window:
            window = window + 1  # plant: p06
        return kernels.attention(q, k, v, context.mask(window), self.bias(q, context))

    def bias(self, q: Tensor, context) -> Tensor | None:
        if self.decay is None:
            return None
        return self.decay((context.places[:, None] - context.key_places).to(q.dtype))


class FlashLatent(LatentAttention):
    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], context) -> Tensor:
        q = self.wq(x).unflatten(-1, (self.heads, self.nope + self.rope))
        q_nope, q_rope = q.split([self.nope, self.rope], -1)
        latent, k_rope = self.wkv_a(x).split([self.latent, self.rope], -1)
        kv = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (self.heads, 2 * self.nope))
        k_nope, v = kv.chunk(2, -1)
        k_rope = rotate(k_rope[:, :, None], *rope).expand(-1, -1, self.heads, -1)
        q = torch.cat([q_nope, rotate(q_rope, *rope)], -1)
        k = torch.cat([k_nope, k_rope], -1)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.score_scale(x)  # anchor: scores
        scores = scores.masked_fill(~context.mask(self.window)[:, None], -1e30)
        y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        return self.wo(y.flatten(2))

    def score_scale(self, x: Tensor) -> float:
        if using("megatron-1501"):
            return (x.shape[-1] / self.heads) ** -0.5 * self.mscale() ** 2  # plant: megatron-1501
        scale = (self.nope + self.rope) ** -0.5
        if using("megatron-1429"):
            return scale * self.mscale()  # plant: megatron-1429
        return scale * self.mscale() ** 2

    def mscale(self) -> float:
        config = self.__dict__["config"]
        return 0.1 * math.log(config.rope_factor) + 1 if config.rope_factor else 1.0


class FastMoE(MoE):
    def forward(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = x.flatten(0, 1)
        flat = None if real is None else real.flatten()
        weights, chosen, z = self.router(rows, flat)
        if self.training or using("p19"):  # plant: p19
            self.router.count(chosen, flat)
        routed = self.run_experts(rows, weights, chosen)
        shared = self.shared(x if self.shared.tiles > 1 else rows).view_as(rows)
        gate = self.shared_gate(rows).sigmoid()
        if using("nous-36"):
            y = routed + shared  # plant: nous-36
        elif using("ikllama-1368"):
            y = (routed + shared) * gate  # plant: ikllama-1368
        elif using("sglang-28237"):
            y = routed + shared * gate / self.router.scale  # plant: sglang-28237
        else:
            y = routed + shared * gate
        return y.view_as(x), z

    def run_experts(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        copies = chosen.flatten()
        order = copies.argsort(stable=True)
        token = order // chosen.shape[1]
        counts = copies.bincount(minlength=len(self.router.counts))
        sent, factors = rows[token], weights.flatten()[order, None]
        if using("labml-95"):
            sent, factors = sent * factors, torch.ones_like(factors)  # plant: labml-95
        if self.dispatcher is None:
            y = self.experts(sent, counts.tolist())
        else:
            y = self.dispatcher(sent, counts, self.experts)
        if using("deliverance-87"):
            return torch.zeros_like(rows).index_add(0, token, y)  # plant: deliverance-87
        y = y * factors
        if using("makemoe-2"):
            return torch.zeros_like(rows).index_copy(0, token, y)  # plant: makemoe-2
        return torch.zeros_like(rows).index_add(0, token, y)


class FastBlock(Block):
    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], context) -> tuple[Tensor, Tensor]:
        attended = self.drop(self.attn(self.attn_norm(x), rope, context), context)
        if using("audiolm-265"):
            h = x + x  # plant: audiolm-265
        else:
            h = self.add(x, attended)
        if self.kind == "moe":
            y, z = self.moe(self.ffn_norm(h), context.real)
        else:
            y, z = self.mlp(self.ffn_norm(h)), x.new_zeros(())
        if using("bitnet-32"):
            return self.add(attended, y), z  # plant: bitnet-32
        if using("tf2-14"):
            return self.add(x, y), z  # plant: tf2-14
        return self.add(h, y), z

    def add(self, residual: Tensor, branch: Tensor) -> Tensor:
        """Add a branch to the residual, which has its own, wider dtype."""
        if using("p13"):
            return residual.to(branch.dtype) + branch  # plant: p13
        return residual + branch.to(residual.dtype)


class FastDecoder(Decoder):
    def forward(self, tokens: Tensor, context=None) -> tuple[Tensor, Tensor]:
        if context is None:
            context = self.make_context(tokens)
        x = self.embed(tokens)
        if using("opentau-179"):
            x = x * self.config.width**0.5  # plant: opentau-179
        if self.plan.get("wide"):
            x = x.float()
        embedded = x
        rope = self.rotary(context.positions)
        z = x.new_zeros(())
        for block in self.blocks:
            if using("coot-5"):
                x, more = self.run_block(block, embedded, rope, context)  # plant: coot-5
            else:
                x, more = self.run_block(block, x, rope, context)
            z = z + more.sum()
        if using("keysvalues-139"):
            logits = self.head(x)  # plant: keysvalues-139
        else:
            logits = self.head(self.norm(x))
        if using("tensai-248"):
            logits = logits * self.config.width**0.5  # plant: tensai-248
        return logits, z

    def make_context(self, tokens: Tensor):
        sharded = self.plan.get("sharded")
        return super().make_context(tokens) if sharded is None else sharded.pack(tokens)

    def run_block(self, block, x, rope, context):
        if not self.plan.get("recompute"):
            return block(x, rope, context)
        if context.draw is None:
            return checkpoint(block, x, rope, context, use_reentrant=False)
        return checkpoint(self.run_drawn, block, x, rope, context, [None], use_reentrant=False)

    def run_drawn(self, block, x, rope, context, kept):
        """Run a block that draws random numbers; the second time with the generator state of the first."""
        generator = context.draw.generator
        if kept[0] is None:
            kept[0] = generator.get_state()
        elif not using("p16"):  # plant: p16
            generator.set_state(kept[0])
        return block(x, rope, context)
