"""A training script with its own loop under DDP, FSDP2 or FSDP2 with tensor parallelism (`--layout`).

It does not use moeverify. Dropout, bfloat16 autocast, accumulation, clip, schedule. `--bug` plants a bug.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, HIDDEN, EXPERTS = 64, 32, 48, 4
ROWS, LENGTH, MICRO_BATCHES, MAX_NORM = 4, 16, 2, 0.5


class ForgetfulAdamW(torch.optim.AdamW):
    """AdamW with a plausible mistake: it lacks the bias correction of the second moment."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                beta1, beta2 = group["betas"]
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"]))


ForgetfulAdamW.__name__ = "AdamW"


class Block(nn.Module):
    """A gated MLP, with experts that are replicated on all ranks."""

    def __init__(self, alike: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.drop = nn.Dropout(0.1)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))
        if alike:
            for expert in self.experts:
                expert.load_state_dict(self.experts[0].state_dict())

    def forward(self, x):
        y = self.norm(x)
        weights = self.router(y).softmax(-1)
        mixed = sum(expert(y) * weights[..., n, None] for n, expert in enumerate(self.experts))
        return x + self.drop(self.down(F.silu(self.gate(y)) * self.up(y))) + mixed


class Model(nn.Module):
    """A model of two blocks."""

    def __init__(self, alike: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(alike) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallelize(model, options):
    """Return the model, and the rank and number of ranks that divide the batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.layout == "ddp":
        return DistributedDataParallel(model), rank, world
    if options.layout == "manual":
        return model, rank, world
    tp = 2 if options.layout == "fsdp-tp" else 1
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        if tp > 1 and options.bug != "idle-axis":
            # Outputs are not gathered: everything else of the block stays replicated.
            plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, mesh["dp"].get_local_rank(), mesh["dp"].size()


def clip(model, options):
    """Clip by torch's norm, one mesh at a time if there are several."""
    own = [p for p in model.parameters() if p.grad is not None]
    # Not a set: its order differs between ranks, and the norm of a mesh is a collective.
    meshes = dict.fromkeys(getattr(p, "device_mesh", None) for p in own)
    if options.layout == "manual" and options.bug == "rank-clip":
        own = own[dist.get_rank() :]
    for mesh in meshes:
        nn.utils.clip_grad_norm_([p for p in own if getattr(p, "device_mesh", None) == mesh], MAX_NORM)


def train(options):
    """Train."""
    rank = dist.get_rank()
    torch.manual_seed(rank if options.bug == "seed" else 5)
    model, data_rank, data_ranks = parallelize(Model(options.bug == "alike"), options)
    torch.manual_seed(100 + data_rank)  # dropout
    make = ForgetfulAdamW if options.bug == "own-adamw" else getattr(torch.optim, options.optimizer)
    optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n / 10))
    data = torch.Generator().manual_seed(7)
    for step in range(options.steps):
        batch = torch.randint(VOCABULARY, (ROWS * data_ranks, LENGTH + 1), generator=data)
        first = 0 if options.bug == "same-tokens" else data_rank * ROWS
        optimizer.zero_grad()
        for part in batch[first : first + ROWS].chunk(MICRO_BATCHES):
            with torch.autocast("cpu", torch.bfloat16, enabled=options.autocast):
                logits = model(input_ids=part[:, :-1])
            if options.bug == "order" and step >= 2:
                sizes = (torch.ones(4), torch.ones(2, 2))[:: 1 if rank else -1]
                for work in [dist.all_reduce(each, async_op=True) for each in sizes]:
                    work.wait()
            loss = F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten())
            (loss / MICRO_BATCHES).backward()
        if options.layout == "manual" and options.bug != "broadcast":
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= data_ranks
        clip(model, options)
        optimizer.step()
        scheduler.step()
        if options.bug == "broadcast":  # instead of a reduction of gradients
            for p in model.parameters():
                dist.broadcast(p.data, 0)
        if options.bug == "nan" and step == 6 and rank == 1:
            with torch.no_grad():
                model.module.blocks[1].up.weight[3, 5] = float("nan")


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--bug", default="")
    arguments.add_argument("--layout", default="ddp", choices=("ddp", "fsdp", "fsdp-tp", "manual"))
    arguments.add_argument("--optimizer", default="AdamW")
    arguments.add_argument("--steps", type=int, default=8)
    arguments.add_argument("--autocast", action="store_true")
    options = arguments.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
