"""A training script with its own loop: tensor parallelism with sequence parallelism, by hand, over all ranks.

It does not use moeverify. Each rank has its part of the sequence outside of the matrix products. `--bug` plants
a bug.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HIDDEN, HEAD, ROWS, LENGTH = 64, 32, 48, 8, 4, 16


def take_part(x):
    return x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


def gather_parts(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=1)


def sum_part(x):
    whole = x.clone()
    dist.all_reduce(whole)
    return take_part(whole)


def make_exchange(forward, backward):
    """Return a function of tensors with its gradient."""

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return forward(x)

        @staticmethod
        def backward(ctx, gradient):
            return backward(gradient)

    return Exchange.apply


def pad_part(gradient):
    parts = [torch.zeros_like(gradient) for _ in range(dist.get_world_size())]
    parts[dist.get_rank()] = gradient
    return torch.cat(parts, dim=1)


class Block(nn.Module):
    """A norm on a part of the sequence, an MLP on the whole one."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN // world)
        self.heads = nn.LayerNorm(HEAD)  # replicated, on a part of the heads
        self.down = nn.Linear(HIDDEN // world, WIDTH, bias=False)
        up, down = torch.randn(HIDDEN, WIDTH) / 6, torch.randn(WIDTH, HIDDEN) / 7
        with torch.no_grad():
            self.up.bias.zero_()
            self.up.weight.copy_(up.chunk(world)[rank])
            self.down.weight.copy_(down.chunk(world, dim=1)[rank])
        self.gather, self.reduce = (
            make_exchange(gather_parts, sum_part),
            make_exchange(sum_part, gather_parts),
        )

    def forward(self, x):
        y = F.gelu(self.up(self.gather(self.norm(x))))
        y = self.heads(y.unflatten(-1, (-1, HEAD))).flatten(-2)
        return x + self.reduce(self.down(y))


class Model(nn.Module):
    """A model of two blocks."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dist.get_rank(), dist.get_world_size()) for _ in range(2))
        self.mix = nn.Linear(WIDTH, WIDTH)  # replicated, on a part of the sequence
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scatter = make_exchange(take_part, pad_part if bug == "scatter" else gather_parts)
        self.gather = make_exchange(gather_parts, take_part)
        self.bug = bug

    def forward(self, tokens):
        x = self.scatter(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        x = self.norm(self.mix(x))
        return self.head(x if self.bug == "no-gather" else self.gather(x))


def lacks_sum(name: str, bug: str) -> bool:
    parts = {"norms": "norm", "inner-norms": ".norm", "mix": "mix", "heads": "heads"}
    return bug in parts and parts[bug] in name


def train(options) -> None:
    """Train."""
    torch.manual_seed(5)
    model = Model(options.bug)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(7)
    for _ in range(options.steps):
        batch = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=data)
        targets = take_part(batch[:, 1:]) if options.bug == "no-gather" else batch[:, 1:]
        logits = model(batch[:, :-1])
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        for name, p in model.named_parameters():
            if any(part in name for part in ("norm", "mix", "heads")) and not lacks_sum(name, options.bug):
                dist.all_reduce(p.grad)
        optimizer.step()


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--bug", default="")
    arguments.add_argument("--steps", type=int, default=4)
    options = arguments.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
