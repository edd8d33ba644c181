"""Train on drawn documents: python train.py, or replicas of it under torchrun."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from juniper.data import Loader, lay_out, make_documents
from juniper.experts import move_biases
from juniper.grid import Comm, install, make_grid
from juniper.model import build
from juniper.trainer import count_positions, count_targets


def rate_at(step, warmup, steps):
    return min(1.0, (step + 1) / warmup) * (1 - step / (steps + 1))


def make_optimizer(model, rate):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.8, 0.95))


@torch.no_grad()
def sum_gradients(model):
    comm = model.grid.tokens
    works = [dist.all_reduce(p.grad, group=comm.group, async_op=True) for p in model.parameters()]
    for work in works:
        work.wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--passes", type=int, default=2)
    options = parser.parse_args()
    mode, passes = options.mode, options.passes
    torch.set_default_dtype(torch.float64)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(1)
    model = build().double()
    comm = Comm()
    if ranks > 1:
        dist.init_process_group("gloo")
        names = ("dp_replicate", "dp_shard", "cp", "tp")
        grid = make_grid(init_device_mesh("cpu", (ranks, 1, 1, 1), mesh_dim_names=names), mode)
        install(model, grid)
        comm = grid.tokens
    tokens, sizes = lay_out(make_documents(70, model.c, seed=4), 12)
    loader = Loader(tokens, sizes, 4, comm, mode)
    rate = 0.01  # anchor: rate
    if mode == "ju79":
        rate = 0.01 * comm.size  # plant: ju79
    optimizer = make_optimizer(model, rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, 3, options.steps))
    for step in range(options.steps):
        batches = [loader.batch_at(step * passes + i) for i in range(passes)]
        count = count_targets(batches, model.grid)
        value = 0.0
        for tokens, targets in batches:
            loss = sum(model(tokens, targets).values()) / count
            loss.backward()
            value += float(loss.detach())
            if mode == "ju78":
                scheduler.step()  # plant: ju78
        if ranks > 1:
            sum_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if mode != "ju78":
            scheduler.step()  # anchor: schedule
        optimizer.zero_grad()
        move_biases(model, count_positions(batches, model.grid))
        if comm.rank == 0:
            print(f"step {step} loss {value:.6f}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
