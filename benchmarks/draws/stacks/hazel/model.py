"""The decoder: sliding and full attention in turn, experts, and a head tied to the embedding."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hazel.comm import all_reduce, copy_to, local, reduce_from
from hazel.config import Config
from hazel.context import Part
from hazel.layers import Attention, RMSNorm, SwiGLU
from hazel.moe import MoE
from hazel.optim import Average
from hazel.packing import Masks, read_packed


class Block(Part):
    def __init__(self, cfg, index):
        super().__init__()
        self.window = cfg.window if index % 2 == 0 else cfg.full
        self.remat = index in cfg.remat_layers
        self.attn_norm, self.mlp_norm = RMSNorm(cfg.width), RMSNorm(cfg.width)
        self.attn = Attention(cfg)
        self.mlp = MoE(cfg) if index in cfg.moe_layers else SwiGLU(cfg.width, cfg.hidden)
        self.mix = nn.Parameter(0.2 * torch.randn(1))

    def forward(self, x, x0, packed, masks, valid):
        args = (x, x0, packed, masks, valid)
        return checkpoint(self.compute, *args, use_reentrant=False) if self.remat else self.compute(*args)

    def compute(self, x, x0, packed, masks, valid):
        """Return the residual stream, and counts and balance terms where the block has experts."""
        x = x + self.mix * x0
        x = x + self.attn(self.attn_norm(x), packed, masks, self.window)
        h = self.mlp_norm(x)
        if not isinstance(self.mlp, MoE):
            return x + self.mlp(h), None, 0.0, 0.0
        y, *stats = self.mlp(h, valid)
        return x + y, *stats


class Net(Part):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab, cfg.width)
        self.blocks = nn.ModuleList(Block(cfg, i) for i in range(cfg.layers))
        self.norm = RMSNorm(cfg.width)
        self.average = None

    def forward(self, tokens, targets):
        """Return the terms of the loss, as sums over tokens."""
        cfg, pc = self.cfg, self.ctx
        packed = read_packed(tokens, cfg.first_word, pc)
        masks, valid = Masks(packed, pc), targets >= 0
        x = x0 = self.embed(tokens)
        batch = sequence = 0.0
        for block in self.blocks:
            x, counts, b, s = block(x, x0, packed, masks, valid)
            if counts is not None:
                block.mlp.count(counts)
            batch, sequence = batch + b, sequence + s
        layers = len(cfg.moe_layers)  # anchor: aux-layers
        if pc.on("hazel-aux-layers"):
            layers = len(self.blocks)  # plant: hazel-aux-layers
        losses, lse = self.head(x, targets, valid)
        return {
            "ce": losses.sum(),
            "z": cfg.z_coef * (lse.square() * valid).sum(),
            "balance": cfg.balance_coef * batch / layers,
            "sequence": cfg.sequence_coef * sequence / layers,
        }

    def head(self, x, targets, valid):
        """Return losses and log-sum-exps of tokens, from this rank's rows of the vocabulary."""
        cfg, pc, tp = self.cfg, self.ctx, self.ctx.group("tp")
        if pc.on("hazel-norm-region"):
            x = self.norm(copy_to(x, tp))  # plant: hazel-norm-region
        else:
            x = copy_to(self.norm(x), tp)  # anchor: norm-region
        raw = x @ local(self.embed.weight).t()
        logits = cfg.softcap * torch.tanh(raw / cfg.softcap)
        rows = logits.shape[-1]
        first = pc.rank("tp") * rows  # anchor: first-row
        if pc.on("hazel-first-row"):
            first = pc.rank("tp") * (cfg.vocab // dist.get_world_size())  # plant: hazel-first-row
        peak = all_reduce(logits.detach().amax(-1), tp, dist.ReduceOp.MAX)
        sums = (logits - peak[..., None]).exp().sum(-1)
        lse = reduce_from(sums, tp).log() + peak
        index = (targets - first).clamp(0, rows - 1)
        source = raw if pc.on("hazel-target-raw") else logits  # plant: hazel-target-raw
        hit = source.gather(-1, index[..., None])[..., 0]  # anchor: hit
        if not pc.on("hazel-target-clamp"):  # plant: hazel-target-clamp
            hit = hit * ((targets >= first) & (targets < first + rows))
        losses = (lse - reduce_from(hit, tp)) * valid
        if pc.on("hazel-z-local"):
            lse = sums.log() + peak  # plant: hazel-z-local
        return losses, lse


class DetachedEmbedding(nn.Embedding):
    """A lookup that leaves gradients of the table to the head."""

    def forward(self, ids):
        return F.embedding(ids, self.weight.detach())  # plant: hazel-embed-detached


def build(ema=False, **sizes):
    """Return the model with initial values drawn in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        net = Net(Config(**sizes)).float()
    finally:
        torch.set_default_dtype(before)
    if ema:
        net.average = Average(net)
    return net


def loss(model, tokens, targets):
    return model(tokens, targets)
