"""A training script with its own loop: FSDP2 over one mesh axis and tensor parallelism over the other.

It does not use moeverify. Without torchrun it trains the same batches on one device. `--bug` plants a bug.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCABULARY, WIDTH, HIDDEN = 64, 32, 48
ROWS, LENGTH, MICRO_BATCHES, MAX_NORM = 8, 16, 4, 0.1


class Block(nn.Module):
    """A gated MLP."""

    is_swapped = False

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm(x)
        gate, up = self.gate(y), self.up(y)
        if self.is_swapped:
            gate, up = up, gate
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    """A model of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallelize(model: nn.Module, options: argparse.Namespace, bug: str):
    tp = options.tp
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if options.dtype == "mixed" else None
    policy = {"mp_policy": mixed} if mixed else {}
    for number, block in enumerate(model.blocks):
        is_wrong = number == 1
        block.is_swapped = is_wrong and bug == "swapped"
        # Each rank of tp continues with its own part of the sum.
        row = (
            RowwiseParallel(output_layouts=Partial())
            if is_wrong and bug == "unreduced"
            else RowwiseParallel()
        )
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": row}
        if tp > 1:
            parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"], **policy)
    fully_shard(model, mesh=mesh["dp"], **policy)
    return mesh


def clip(model, bug):
    """Clip by the global norm; torch's own clip does not accept gradients of several meshes together."""
    grads = [p.grad for p in model.parameters()]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
    total = sum(g.float().square().sum() for g in (local if bug in ("local-norm", "norm-twice") else whole))
    if bug == "norm-twice":  # replicas over tp are counted once per rank
        dist.all_reduce(total)
    norm = float(total.sqrt())
    for g in local:
        g.mul_(min(1.0, MAX_NORM / norm))
    return norm


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--bug", default="")
    arguments.add_argument("--steps", type=int, default=2)
    arguments.add_argument("--tp", type=int, default=2)
    arguments.add_argument("--dtype", choices=("float32", "mixed", "bfloat16"), default="float32")
    options = arguments.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    bug = options.bug if world > 1 else ""
    torch.manual_seed(5)
    model = Model().to(torch.bfloat16 if options.dtype == "bfloat16" else torch.float32)
    data_rank, data_ranks = 0, 1
    if world > 1:
        dist.init_process_group("gloo")
        mesh = parallelize(model, options, bug)
        data_rank, data_ranks = mesh["dp"].get_local_rank(), mesh["dp"].size()
        if bug == "tp-data":  # ranks of tp get different rows
            data_rank, data_ranks = dist.get_rank(), world
    named = [(n, p) for n, p in model.named_parameters() if bug != "forgotten" or "norm" not in n]
    optimizer = torch.optim.AdamW([p for _, p in named], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    data = torch.Generator().manual_seed(7)
    for step in range(options.steps):
        batch = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=data)
        share = ROWS // data_ranks
        first = 0 if bug == "data" else data_rank * share
        if bug != "no-zero":
            optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for part in batch[first : first + share].chunk(MICRO_BATCHES):
            if bug == "zero-grad":
                optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=world == 1 and options.dtype == "mixed"):
                logits = model(input_ids=part[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten())
            (loss if bug == "divisor" else loss / MICRO_BATCHES).backward()
            total += loss.detach() / MICRO_BATCHES / world
            if bug == "scheduler":
                scheduler.step()
        norm = clip(model, bug)
        optimizer.step()
        if bug != "scheduler":
            scheduler.step()
        if world > 1:
            dist.all_reduce(total)
        if int(os.environ.get("RANK", "0")) == 0:
            sys.stdout.write(f"step {step} loss {total.item():.7f} norm {norm:.7f}\n")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
