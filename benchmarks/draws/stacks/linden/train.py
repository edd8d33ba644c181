"""Train on random documents: python train.py, or replicas under torchrun."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from linden.data import Reader, make_documents, pack
from linden.moe import move_bias
from linden.net import build
from linden.rules import UNDECAYED, factor_of
from linden.shard import leaf_of
from linden.topo import all_sum, make_topo


def groups_of(net, decay):
    named = list(net.named_parameters())
    return [
        {"params": [p for n, p in named if leaf_of(n) not in UNDECAYED], "weight_decay": decay},
        {"params": [p for n, p in named if leaf_of(n) in UNDECAYED], "weight_decay": 0.0},
    ]


@torch.no_grad()
def sum_gradients(net):
    for parameter in net.parameters():
        all_sum(parameter.grad, net.topo.data)


def save(net, optimizer, scheduler, reader):
    return {
        "net": {name: x.clone() for name, x in net.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "given": reader.given,
    }


def load(state, net, optimizer, scheduler, reader):
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    if not net.topo.on("linden-given-lost"):  # plant: linden-given-lost
        reader.given = state["given"]


def make_tools(net, rows, rank, ranks):
    optimizer = torch.optim.AdamW(groups_of(net, net.sizes.decay), lr=0.01, betas=net.sizes.betas)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor_of(step, net.sizes))
    return optimizer, scheduler, Reader(rows, 4, rank, ranks)


def train_batch(net, reader, accumulate):
    """Accumulate gradients of the loss per token over some batches. Returns this rank's part of the loss."""
    topo, total = net.topo, 0.0
    batches = [reader.read() for _ in range(accumulate)]
    if topo.on("linden-batch-again"):
        batches = [batches[0] for _ in batches]  # plant: linden-batch-again
    count = sum(targets.numel() for _, targets in batches) * topo.data.size  # anchor: script-count
    if topo.on("linden-script-count"):
        count = sum(targets.numel() for _, targets in batches)  # plant: linden-script-count
    for tokens, targets in batches:
        value = sum(net(tokens, targets).values()) / count
        value.backward()
        total += float(value.detach())
    return total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trial", default="")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--stop-after", type=int, default=2)
    options = parser.parse_args()
    trial = options.trial
    torch.set_default_dtype(torch.float64)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    seed = 0  # anchor: init-seed
    if trial == "linden-init-rank":
        seed = rank  # plant: linden-init-rank
    torch.manual_seed(seed)
    net = build().double()
    if ranks > 1:
        dist.init_process_group("gloo")
        names = ("dp_replicate", "dp_shard", "cp", "tp")
        net.topo = make_topo(init_device_mesh("cpu", (ranks, 1, 1, 1), mesh_dim_names=names), trial)
    rows = pack(make_documents(40, net.sizes, seed=2), 12)
    optimizer, scheduler, reader = make_tools(net, rows, rank, ranks)
    for step in range(options.steps):
        if step == options.stop_after:
            state = save(net, optimizer, scheduler, reader)
            optimizer, scheduler, reader = make_tools(net, rows, rank, ranks)
            load(state, net, optimizer, scheduler, reader)
        total = train_batch(net, reader, options.accumulate)
        if ranks > 1:
            sum_gradients(net)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        move_bias(net)
        if rank == 0:
            print(f"step {step} loss {total:.6f}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
