"""The decoder, its head over a vocabulary that ranks share, and the block for the token after the next."""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sorrel.comms import copied, gather, reduce_, scatter, total
from sorrel.config import SorrelConfig
from sorrel.grid import GridModule
from sorrel.layers import GatedFFN, LatentAttention, Norm, linear
from sorrel.moe import MoE
from sorrel.segments import next_of, read_segments


class Block(GridModule):
    def __init__(self, config, index):
        super().__init__()
        self.remat = index in config.remat_layers
        self.attn_norm, self.ffn_norm = Norm(config.width), Norm(config.width)
        self.attn = LatentAttention(config)
        dense = index < config.dense_layers
        self.ffn = GatedFFN(config.width, config.hidden) if dense else MoE(config)
        self.branch = nn.Parameter(torch.tensor([0.9, 0.7]) + 0.1 * torch.randn(2))

    def forward(self, x, segments):
        if self.remat:
            x, chosen, *terms = checkpoint(self.run, x, segments, use_reentrant=False)
        else:
            x, chosen, *terms = self.run(x, segments)
        if chosen is not None:
            self.ffn.router.count(chosen)
        return x, *terms

    def run(self, x, segments):
        """Return the stream, the chosen experts, and the terms of z and balance."""
        x = x + self.branch[0] * self.attn(self.attn_norm(x), segments)
        h = self.ffn_norm(x)
        if isinstance(self.ffn, GatedFFN):
            return x + self.branch[1] * self.ffn(h), None, 0.0, 0.0
        y, chosen, z, balance = self.ffn(h)
        return x + self.branch[1] * y, chosen, z, balance


class Table(GridModule):
    """The embedding, of which a rank of `tp` has some rows, and the head that is tied to it."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.randn(config.vocab, config.width) * config.width**-0.5)

    def first(self):
        return self.grid.rank("tp") * self.weight.shape[0]

    def forward(self, tokens):
        rows, index = self.weight.shape[0], tokens - self.first()
        mine = (index >= 0) & (index < rows)  # anchor: mine
        if self.grid.has("sorrel-table-border"):
            mine = (index >= 0) & (index <= rows)  # plant: sorrel-table-border
        x = F.embedding(index.clamp(0, rows - 1), self.weight) * mine[..., None]
        return scatter(x * self.config.embed_scale, self.grid.group("tp"), 1)

    def losses(self, h, targets):
        """Return the loss of each token, 0 for targets that do not count."""
        grid, tp, cap = self.grid, self.grid.group("tp"), self.config.logit_cap
        logits = gather(h, tp, 1) @ self.weight.t()
        logits = cap * torch.tanh(logits / cap)
        first = self.first()
        if grid.has("sorrel-same-lse"):
            peak = reduce_(logits.detach().amax(-1), tp, dist.ReduceOp.MAX)
            lse = total((logits - peak[..., None]).exp().sum(-1), tp).log() + peak
            index = targets - first
            mine = (index >= 0) & (index < logits.shape[-1])
            hit = logits.gather(-1, index.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0] * mine
            return (lse - total(hit, tp)) * (targets >= 0)
        return VocabLoss.apply(logits, targets, first, grid) * (targets >= 0)


class VocabLoss(Function):
    """Cross entropy over logits of which a rank has those of its rows."""

    @staticmethod
    def forward(ctx, logits, targets, first, grid):
        tp = grid.group("tp")
        peak = logits.amax(-1)
        if not grid.has("sorrel-peak-own"):  # plant: sorrel-peak-own
            peak = reduce_(peak, tp, dist.ReduceOp.MAX)  # anchor: peak
        exps = (logits - peak[..., None]).exp()
        sums = reduce_(exps.sum(-1), tp)
        index = targets - first
        mine = (index >= 0) & (index < logits.shape[-1])
        index = index.clamp(0, logits.shape[-1] - 1)
        hit = reduce_(logits.gather(-1, index[..., None])[..., 0] * mine, tp)
        ctx.save_for_backward(exps / sums[..., None], index, mine)
        ctx.grid = grid
        return sums.log() + peak - hit

    @staticmethod
    def backward(ctx, grad):
        probs, index, mine = ctx.saved_tensors
        one = mine.to(probs.dtype)  # anchor: one
        if ctx.grid.has("sorrel-one-hot"):
            one = torch.ones_like(probs[..., 0])  # plant: sorrel-one-hot
        out = probs.scatter_add(-1, index[..., None], -one[..., None])
        return out * grad[..., None], None, None, None


class Ahead(GridModule):
    """Predicts the token after the next from the stream and the next token."""

    def __init__(self, config):
        super().__init__()
        self.h_norm, self.e_norm, self.norm = (Norm(config.width) for _ in range(3))
        self.mix = linear(2 * config.width, config.width)
        self.block = Block(config, 0)

    def forward(self, h, embedded, segments):
        x = self.mix(torch.cat([self.h_norm(h), self.e_norm(embedded)], -1))
        return self.norm(self.block(x, segments)[0])


class Sorrel(GridModule):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.table = Table(config)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.depth))
        self.norm = Norm(config.width)
        self.ahead = Ahead(config)
        self.ema = None

    def forward(self, tokens, targets):
        """Return the terms of the loss as sums over the tokens of this rank."""
        segments = read_segments(tokens, self.config, self.grid)
        x, z, balance = self.trunk(self.table(tokens), segments)
        return self.ends(x, tokens, targets, segments) | self.router_terms(z, balance)

    def trunk(self, x, segments):
        z = balance = 0.0
        for layer in self.layers:
            x, layer_z, layer_balance = layer(x, segments)
            z, balance = z + layer_z, balance + layer_balance
        return x, z, balance

    def router_terms(self, z, balance):
        """Add up terms of the router, which saw a part of the positions."""
        tp = self.grid.group("tp")
        if torch.is_tensor(z):
            if self.grid.has("sorrel-z-summed"):
                z = copied(total(z, tp), tp)  # plant: sorrel-z-summed
            else:
                z = total(z, tp)  # anchor: z-total
            balance = total(balance, tp)
        return {"z": z, "balance": balance}

    def ends(self, x, tokens, targets, segments):
        """Return the loss of next tokens and that of the tokens after them."""
        c, grid = self.config, self.grid
        ce = self.table.losses(self.norm(x), targets).sum()
        embedded = self.table(next_of(tokens, 0, grid))
        later = next_of(targets, -100, grid)
        if not grid.has("sorrel-ahead-docs"):  # plant: sorrel-ahead-docs
            later = later.masked_fill(segments.ends, -100)  # anchor: ahead-docs
        mtp = self.table.losses(self.ahead(x, embedded, segments), later).sum()
        coef = c.mtp_coef  # anchor: mtp-coef
        if grid.has("sorrel-ahead-cp"):
            coef = c.mtp_coef / grid.size("cp")  # plant: sorrel-ahead-cp
        return {"ce": ce, "mtp": coef * mtp}


def build(**sizes):
    """Return the model, with initial values that do not depend on the processor."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    ema = sizes.pop("ema", False)
    try:
        model = Sorrel(SorrelConfig(**sizes)).float()
    finally:
        torch.set_default_dtype(before)
    if ema:
        from sorrel.adam import Ema

        model.ema = Ema(model)
    return model


def loss(model, tokens, targets):
    return model(tokens, targets)
