"""The model: blocks with a norm before and after each part, and two heads on one table."""

from torch import nn
from torch.utils.checkpoint import checkpoint

from juniper.attention import Attention, Norm
from juniper.collectives import total
from juniper.config import Config
from juniper.experts import Mlp, Moe, Router, count_load
from juniper.grid import Grid
from juniper.head import Ahead, Table
from juniper.seq import one_later, read
from juniper.weights import draw, load


class Block(nn.Module):
    grid = Grid()
    cuts, partial = {}, ()

    def __init__(self, c, layer):
        super().__init__()
        self.attn = Attention(c, c.is_global(layer))
        self.ffn = Mlp(c.width, c.dense_hidden) if c.is_dense(layer) else Moe(c)
        self.pre_attn, self.post_attn = Norm(c.width), Norm(c.width)
        self.pre_ffn, self.post_ffn = Norm(c.width), Norm(c.width)

    def forward(self, x, seq):
        """Return the stream, the chosen experts or None, and the balance term."""
        x = x + self.post_attn(self.attn(self.pre_attn(x), seq))
        h = self.pre_ffn(x)
        if isinstance(self.ffn, Mlp):
            return x + self.post_ffn(self.ffn(h)), None, x.new_zeros(())
        y, chosen, balance = self.ffn(h, x)
        return x + self.post_ffn(y), chosen, balance


class Juniper(nn.Module):
    grid = Grid()
    cuts, partial = {}, ()
    reducer = run = None

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.table = Table(c)
        self.blocks = nn.ModuleDict({str(i): Block(c, i) for i in range(c.layers)})
        self.norm = Norm(c.width)
        self.ahead = Ahead(c, Block(c, c.layers))

    def routers(self):
        return [module for module in self.modules() if isinstance(module, Router)]

    def run_blocks(self, names, x, seq):
        balance = x.new_zeros(())
        for name in names:
            block = self.blocks[name]
            if int(name) in self.c.recompute:
                x, chosen, term = checkpoint(block, x, seq, use_reentrant=False)
            else:
                x, chosen, term = block(x, seq)
            if chosen is not None and self.grid.mode != "ju25":
                count_load(block.ffn.router, chosen)  # anchor: count-load
            balance = balance + term
        return x, balance

    def end(self, x, tokens, targets, seq):
        """Return the terms of the loss of the last blocks' stream."""
        later = one_later(targets, self.grid)
        ahead, chosen, balance = self.ahead(x, tokens, targets, later, seq, self.table)
        if self.grid.mode != "ju25":
            count_load(self.ahead.block.ffn.router, chosen)
        return {"next": self.table.loss(self.norm(x), targets), "ahead": self.c.ahead_weight * ahead}, balance

    def forward(self, tokens, targets):
        """Return the terms of the loss, summed over tokens of this rank."""
        seq = read(tokens, self.c, self.grid)
        x, balance = self.run_blocks(list(self.blocks), self.table(tokens), seq)
        terms, term = self.end(x, tokens, targets, seq)
        return {**terms, "balance": total(balance + term, self.grid.tp)}


class Shadow(nn.Module):
    """A moving average of the parameters, in buffers."""

    def __init__(self, model):
        super().__init__()
        for name, parameter in model.named_parameters():
            self.register_buffer(name.replace(".", "_"), parameter.detach().clone())


def build(**changes):
    c = Config(**changes)
    model = Juniper(c)
    model.source = draw(c)
    load(model, model.source)
    if c.average:
        model.shadow = Shadow(model)
    return model


def loss(model, tokens, targets):
    return model(tokens, targets)
