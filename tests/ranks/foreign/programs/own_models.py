"""Models and functions that a user might name: right ones, and one of each kind of wrong."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


class Small(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, 32)
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("aside", torch.ones(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.embed(tokens))) + self.turns.imag.sum()


def make(dropout: float = 0.0) -> Small:
    return Small(dropout)


def make_nothing() -> int:
    return 3


def make_failing() -> Small:
    raise ValueError("the weights are gone")


class Narrow(Small):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens)[:, 0]


def sum_tokens(model, tokens, targets):
    logits = model(tokens).flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")


def sum_unless_fsdp2(model, tokens, targets):
    if isinstance(model, FSDPModule):
        raise TypeError("this is FSDP2")
    return sum_tokens(model, tokens, targets)


def each_token(model, tokens, targets):
    logits = model(tokens).mT
    return nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="none")


def mean_tokens(model, tokens, targets):
    return sum_tokens(model, tokens, targets) / (targets != -100).sum()


def shard_blocks(model, mesh):
    for block in model.layers.values():
        fully_shard(block, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    return model


def forget_to_shard(model, mesh):
    return model


def return_nothing(model, mesh):
    fully_shard(model, mesh=mesh["dp_shard"])


def halve_at_the_end(model, mesh):
    """Finish every step's gradients by a mistake, with the function that may complete them."""
    fully_shard(model, mesh=mesh["dp_shard"])

    def finish() -> None:
        for parameter in model.parameters():
            parameter.grad /= 2

    return model, finish


number = 3
