"""Train on random documents: python train.py, or replicas under torchrun."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sorrel.adam import decays, rate_of
from sorrel.grid import Grid, install
from sorrel.model import build
from sorrel.moe import Router


def make_rows(count, length, config, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(config.num_ends, config.vocab, (count, length), generator=generator)
    stops = torch.rand(count, length, generator=generator) < 0.15
    names = torch.randint(config.num_ends, (count, length), generator=generator)
    return torch.where(stops, names, rows)


class Stream:
    """Rows of this rank for each micro-batch, in an order that all ranks draw alike."""

    def __init__(self, rows, size, rank, ranks, variant):
        self.rows, self.size, self.rank, self.ranks = rows, size, rank, ranks
        self.seed, self.variant, self.given = 5, variant, 0

    def order(self):
        seed = self.seed  # anchor: order-seed
        if self.variant == "sorrel-order-rank":
            seed = self.seed + self.rank  # plant: sorrel-order-rank
        return torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(seed))

    def next(self):
        places = torch.arange(self.given, self.given + self.size) % len(self.rows)
        self.given += self.size
        return self.rows[self.order()[places][self.rank :: self.ranks]]


def groups_of(model, config):
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": config.weight_decay},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
    ]


def mean_gradients(model, ranks):
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= ranks
    start = 0
    for parameter in model.parameters():
        parameter.grad.copy_(flat[start : start + parameter.numel()].view_as(parameter))
        start += parameter.numel()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    options = parser.parse_args()
    variant = options.variant
    torch.set_default_dtype(torch.float64)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    model = build().double()
    config = model.config
    if ranks > 1:
        dist.init_process_group("gloo")
        names = ("dp_replicate", "dp_shard", "cp", "tp")
        install(model, Grid(init_device_mesh("cpu", (ranks, 1, 1, 1), mesh_dim_names=names), variant))
    stream = Stream(make_rows(40, 17, config, seed=2), 8, rank, ranks, variant)
    optimizer = torch.optim.AdamW(groups_of(model, config), lr=0.01, betas=config.betas)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_of(step, config))
    for step in range(options.steps):
        batches = [stream.next() for _ in range(options.accumulate)]
        batches = [(rows[:, :-1], rows[:, 1:]) for rows in batches]
        count = sum(targets.numel() for _, targets in batches)
        total = 0.0
        for tokens, targets in batches:
            value = sum(model(tokens, targets).values()) / count
            if variant == "sorrel-accumulated-mean":
                value = value / len(batches)  # plant: sorrel-accumulated-mean
            value.backward()
            total += float(value.detach())
        if ranks > 1:
            mean_gradients(model, ranks)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        if variant == "sorrel-schedule-ranks":
            for _ in range(ranks - 1):
                scheduler.step()  # plant: sorrel-schedule-ranks
        optimizer.zero_grad()
        for module in model.modules():
            if isinstance(module, Router):
                module.update_bias()
        if rank == 0:
            print(f"step {step} loss {total:.6f}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
