"""A training script whose optimizer averages gradients over ranks itself, as those of ZeRO do.

It does not use moeverify. It divides the gradients, not the loss, by the number of micro-batches. `--bug` plants
a bug.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, ROWS, LENGTH = 32, 16, 8, 12


class ReducingAdamW(torch.optim.AdamW):
    """AdamW on gradients averaged over ranks in buffers of its own, so that `p.grad` stays local."""

    def __init__(self, params, bug: str) -> None:
        super().__init__(params, lr=1e-2)
        self.bug = bug

    @torch.no_grad()
    def step(self, closure=None):
        own = [p for group in self.param_groups for p in group["params"]]
        local = [p.grad for p in own]
        for p in own:
            p.grad = p.grad.clone()
            if dist.is_initialized() and self.bug != "unreduced":
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        super().step()
        for p, gradient in zip(own, local, strict=True):
            p.grad = gradient


def train(bug: str, rank: int, world: int) -> None:
    """Train on the same 8 rows in micro-batches of 2, whatever the number of ranks."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    )
    optimizer = ReducingAdamW(model.parameters(), bug)
    data = torch.Generator().manual_seed(7)
    share = ROWS // world
    for _ in range(3):
        batch = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=data)
        parts = batch[rank * share : (rank + 1) * share].split(2)
        for part in parts:
            logits = model(part[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()).backward()
        for p in model.parameters():
            p.grad /= ROWS // 2 if bug == "divisor" else len(parts)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--bug", default="")
    bug = arguments.parse_args().bug
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    train(bug, rank, world)
    if world > 1:
        dist.barrier()  # "unreduced" has no other collective; a rank that ends would fail one that still connects
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
