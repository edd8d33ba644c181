"""A small decoder with latent or plain attention and a mixture of experts, with optional LoRA adapters."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS = 4


def rotate(x: Tensor) -> Tensor:
    """Rotate (batch, heads, positions, dim) by position."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)[:, None] / 10000 ** (
        torch.arange(half, dtype=x.dtype, device=x.device) / half
    )
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class LoraLinear(nn.Module):
    def __init__(self, width_in: int, width_out: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width_in, width_out, bias=False)
        self.lora_A = nn.Parameter(torch.randn(rank, width_in) * 0.2)
        self.lora_B = nn.Parameter(torch.randn(width_out, rank) * 0.2)

    def merged(self) -> Tensor:
        return self.base.weight + self.lora_B @ self.lora_A

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.lora_A.T) @ self.lora_B.T


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dim = width // HEADS
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    nope, rope, value, latent = 8, 4, 8, 12

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, HEADS * (self.nope + self.rope), bias=False)
        self.kv_a = nn.Linear(width, self.latent + self.rope, bias=False)
        self.kv_b = LoraLinear(self.latent, HEADS * (self.nope + self.value), rank)
        self.o = nn.Linear(HEADS * self.value, width, bias=False)
        self.backend = "plain"

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, HEADS, -1).transpose(1, 2)
        q_nope, q_rope = q.split([self.nope, self.rope], -1)
        latent, k_rope = self.kv_a(x).split([self.latent, self.rope], -1)
        q_rope, k_rope = rotate(q_rope), rotate(k_rope[:, None])
        scale = (self.nope + self.rope) ** -0.5
        if self.backend == "plain":
            kv = self.kv_b(latent).view(b, s, HEADS, -1).transpose(1, 2)
            k_nope, v = kv.split([self.nope, self.value], -1)
            k = torch.cat([k_nope, k_rope.expand(-1, HEADS, -1, -1)], -1)
            y = F.scaled_dot_product_attention(
                torch.cat([q_nope, q_rope], -1), k, v, is_causal=True, scale=scale
            )
        else:
            y = self.absorbed(q_nope, q_rope, latent, k_rope, scale)
        return self.o(y.transpose(1, 2).flatten(2))

    def absorbed(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, scale: float
    ) -> Tensor:
        """Attend in the latent space, with the up-projection folded into queries and outputs."""
        if self.backend == "absorbed":
            weight = self.kv_b.merged()
        else:
            weight = self.kv_b.base.weight  # plant: p64
        weight = weight.view(HEADS, self.nope + self.value, self.latent)
        q = torch.cat([torch.einsum("bhsd,hdl->bhsl", q_nope, weight[:, : self.nope]), q_rope], -1)
        latent = latent[:, None]
        k = torch.cat([latent, k_rope], -1).expand(-1, HEADS, -1, -1)
        y = F.scaled_dot_product_attention(
            q, k, latent.expand(-1, HEADS, -1, -1), is_causal=True, scale=scale
        )
        return torch.einsum("bhsl,hvl->bhsv", y, weight[:, self.nope :])


class Router(nn.Module):
    def __init__(self, width: int, num_experts: int, top_k: int, score: str) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.register_buffer("correction", torch.randn(num_experts) * 0.1)
        self.top_k, self.score = top_k, score
        self.fused = False

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.gate(rows)
        scores = logits.sigmoid() if self.score == "sigmoid" else logits.softmax(-1)
        chosen = (scores + self.correction).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen, self.balance_scores(scores)

    def balance_scores(self, scores: Tensor) -> Tensor:
        """Return the scores for the balance loss, which sum to one over the experts."""
        if self.fused and self.score == "sigmoid" and self.top_k == 1:
            return scores  # plant: p48
        return scores / scores.sum(-1, keepdim=True)


def local(weight: Tensor) -> Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight


class Experts(nn.Module):
    """The MLPs of all experts, or of one rank's experts or slices of experts."""

    def __init__(self, num_experts: int, width: int, inner: int, rank: int) -> None:
        super().__init__()
        self.w_gate = nn.Parameter(torch.randn(num_experts, width, inner) * 0.2)
        self.w_up = nn.Parameter(torch.randn(num_experts, width, inner) * 0.2)
        self.w_down = nn.Parameter(torch.randn(num_experts, inner, width) * 0.2)
        self.b_down = nn.Parameter(torch.randn(num_experts, width) * 0.2)
        self.rank, self.num_experts = rank, num_experts
        if rank:
            # Flattened as PEFT does: A has the experts slowest, B has them fastest.
            self.lora_A = nn.Parameter(torch.randn(num_experts * rank, inner) * 0.2)
            self.lora_B = nn.Parameter(torch.randn(width, rank * num_experts) * 0.2)
        self.first = 0
        self.grouped: dict | None = None  # options of the grouped path

    def adapter(self) -> tuple[Tensor, Tensor]:
        """Return A as (experts, rank, inner) and B as (experts, rank, width)."""
        a = self.lora_A.view(self.num_experts, self.rank, -1)
        if self.grouped and self.grouped.get("adapter_order") == "experts_first":
            b = self.lora_B.view(-1, self.num_experts, self.rank).permute(1, 2, 0)  # plant: p62
        else:
            b = self.lora_B.view(-1, self.rank, self.num_experts).permute(2, 1, 0)
        return a, b

    def forward(self, rows: Tensor, probs: Tensor, counts: list[int]) -> Tensor:
        gate, up, down, bias = (local(w) for w in (self.w_gate, self.w_up, self.w_down, self.b_down))
        if self.rank:
            a, b = self.adapter()
        out = []
        for e, (x, p) in enumerate(zip(rows.split(counts), probs.split(counts), strict=True)):
            if self.grouped is None:
                h = F.silu(x @ gate[e]) * (x @ up[e])
                y = h @ down[e] + bias[e]
                if self.rank:
                    y = y + (h @ a[e].T) @ b[e]
                out.append(p[:, None] * y)
                continue
            h = x @ torch.cat([gate[e], up[e]], -1)
            block = self.grouped.get("glu_block")
            if block:
                h = h.view(len(h), h.shape[-1] // (2 * block), 2, block)  # plant: p55
                g, u = h[:, :, 0].flatten(1), h[:, :, 1].flatten(1)  # plant: p55
            else:
                g, u = h.chunk(2, -1)
            h = F.silu(g) * u * p[:, None]
            y = h @ down[e]
            if self.grouped.get("bias") == "epilogue":
                y = y + bias[e]  # plant: p47
            else:
                y = y + p[:, None] * bias[e]
            if self.rank:
                y = y + (h @ a[self.first + e].T) @ b[self.first + e]
            out.append(y)
        return torch.cat(out)


class MoE(nn.Module):
    def __init__(self, width: int, inner: int, num_experts: int, top_k: int, score: str, rank: int) -> None:
        super().__init__()
        self.router = Router(width, num_experts, top_k, score)
        self.experts = Experts(num_experts, width, inner, rank)
        self.dispatcher = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.flatten(0, -2)
        weights, chosen, scores = self.router(rows)
        if self.dispatcher is not None:
            y = self.dispatcher(rows, weights, chosen, self.experts)
        else:
            slots = chosen.flatten()
            order = slots.argsort(stable=True)
            counts = slots.bincount(minlength=scores.shape[-1]).tolist()
            token = order // chosen.shape[1]
            back = self.experts(rows[token], weights.flatten()[order], counts)
            y = torch.zeros_like(rows).index_add(0, token, back)
        return y.view_as(x), scores, chosen


class Block(nn.Module):
    def __init__(self, width, inner, num_experts, top_k, score, latent, rank, attention_rank) -> None:
        super().__init__()
        self.norm_1 = nn.RMSNorm(width, eps=1e-6)
        self.norm_2 = nn.RMSNorm(width, eps=1e-6)
        self.attn = LatentAttention(width, attention_rank) if latent else Attention(width)
        self.moe = MoE(width, inner, num_experts, top_k, score, rank)
        for norm in (self.norm_1, self.norm_2):
            nn.init.normal_(norm.weight, 1.0, 0.2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attn(self.norm_1(x))
        y, scores, chosen = self.moe(self.norm_2(x))
        return x + y, scores, chosen


class Average(nn.Module):
    """Running averages of some weights, as buffers."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.names = names
        for name in names:
            self.register_buffer(name.replace(".", "_"), model.get_parameter(name).detach().clone())


class Decoder(nn.Module):
    def __init__(
        self, vocab=96, width=32, inner=20, layers=2, num_experts=8, top_k=2, score="softmax",
        latent=False, rank=0, attention_rank=3, average=False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            Block(width, inner, num_experts, top_k, score, latent, rank, attention_rank)
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocab, bias=False)
        if average:
            self.average = Average(self, ["head.weight", "layers.0.moe.router.gate.weight"])
        self.options: dict = {}
        self.done = 0

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x, routing = self.embed(tokens), []
        for layer in self.layers:
            x, scores, chosen = layer(x)
            routing.append((scores, chosen))
        return self.head(self.norm(x)), routing


def make(**arguments) -> Decoder:
    return Decoder(**arguments)


def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return cross entropy and a balance loss of each row, both summed over the valid tokens."""
    logits, routing = model(tokens)
    ce = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    valid = (targets != -100).to(logits.dtype)
    aux = logits.new_zeros(())
    for scores, chosen in routing:
        experts = scores.shape[-1]
        scores = scores.view(*tokens.shape, experts)
        counts = F.one_hot(chosen, experts).sum(1).to(scores.dtype).view(*tokens.shape, experts)
        number = valid.sum(1).clamp(min=1)
        fraction = (counts * valid[..., None]).sum(1) / number[:, None]
        mean = (scores * valid[..., None]).sum(1) / number[:, None]
        aux = aux + (experts * (fraction * mean).sum(-1) * valid.sum(1)).sum()
    return {"ce": ce, "aux": 0.02 * aux}
