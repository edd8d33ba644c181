"""A training script with its own loop: two pipeline stages that share the embedding.

It does not use moeverify. `--bug` plants a bug.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, ROWS, LENGTH = 64, 32, 4, 16


class Stage(nn.Module):
    """A layer; before it the embedding in the first stage, after it the same as head in the second."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = [nn.Linear(WIDTH, WIDTH) for _ in range(2)][rank]
        self.is_first = rank == 0

    def forward(self, x):
        x = self.embed(x) if self.is_first else x
        x = x + F.gelu(self.layer(self.norm(x)))
        return x if self.is_first else x @ self.embed.weight.T


def run_first(stage, batch) -> None:
    output = stage(batch[:, :-1])
    dist.send(output.detach(), 1)
    gradient = torch.empty_like(output)
    dist.recv(gradient, 1)
    output.backward(gradient)


def run_last(stage, batch) -> None:
    received = torch.empty(ROWS, LENGTH, WIDTH)
    dist.recv(received, 0)
    received.requires_grad_()
    F.cross_entropy(stage(received).flatten(0, 1), batch[:, 1:].flatten()).backward()
    dist.send(received.grad, 0)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--bug", default="")
    bug = arguments.parse_args().bug
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    stage = Stage(dist.get_rank())
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(7)
    for _ in range(4):
        batch = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=data)
        optimizer.zero_grad()
        (run_first if dist.get_rank() == 0 else run_last)(stage, batch)
        if bug != "tied":
            dist.all_reduce(stage.embed.weight.grad)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
