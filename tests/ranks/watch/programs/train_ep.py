"""A training script with its own loop: DDP for dense layers, expert parallelism over all ranks.

It does not use moeverify. Without torchrun it trains the same batches on one device. `--bug` plants a bug.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, HIDDEN, EXPERTS, TOP_K = 64, 32, 48, 4, 2
ROWS, LENGTH, MICRO_BATCHES, MAX_NORM = 8, 16, 4, 0.05


class Exchange(torch.autograd.Function):
    """All-to-all of rows, and its gradient."""

    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.sizes = send, receive
        received = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), receive, send)
        return received

    @staticmethod
    def backward(ctx, gradient):
        send, receive = ctx.sizes
        returned = gradient.new_empty(sum(send), gradient.shape[1])
        dist.all_to_all_single(returned, gradient.contiguous(), send, receive)
        return returned, None, None


class Experts(nn.Module):
    """The experts of this rank, stacked."""

    def __init__(self, seed: int, first: int, count: int, alike: bool) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        up = torch.randn(EXPERTS, WIDTH, HIDDEN, generator=draw) / math.sqrt(WIDTH)
        down = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=draw) / math.sqrt(HIDDEN)
        first = 0 if alike else first
        self.up = nn.Parameter(up[first : first + count].clone())
        self.down = nn.Parameter(down[first : first + count].clone())

    def forward(self, rows, numbers):
        out = torch.zeros_like(rows)
        for expert in range(len(self.up)):
            mine = (numbers == expert).nonzero()[:, 0]
            mapped = F.gelu(rows[mine] @ self.up[expert]) @ self.down[expert]
            out = out.index_add(0, mine, mapped.to(out.dtype))
        return out


class MoE(nn.Module):
    """Router, dispatch, experts, combine."""

    def __init__(self, seed: int, rank: int, world: int, bug: str) -> None:
        super().__init__()
        self.world, self.bug = world, bug
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.shared = nn.Linear(WIDTH, WIDTH)
        count = EXPERTS // world
        self.experts = Experts(seed, rank * count, count, bug == "alike")

    def forward(self, x):
        shape, flat = x.shape, x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).softmax(-1).topk(TOP_K, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.reshape(-1).argsort(stable=True)
        numbers = chosen.reshape(-1)[order]
        rows = flat[order // TOP_K]
        rows = self.exchange(rows, numbers) if self.world > 1 else self.experts(rows, numbers)
        if self.bug == "combine" and self.world > 1:
            order = order.flip(0)
        back = torch.zeros_like(rows).index_copy(0, order, rows)
        combined = (back.reshape(-1, TOP_K, shape[-1]) * weights[..., None]).sum(1)
        return (combined + self.shared(flat)).reshape(shape)

    def exchange(self, rows, numbers):
        count = EXPERTS // self.world
        counts = torch.bincount(numbers, minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        send = counts.reshape(self.world, count).sum(1).tolist()
        receive = theirs.reshape(self.world, count).sum(1).tolist()
        arrived = Exchange.apply(rows, send, receive)
        local = torch.arange(count).repeat(self.world).repeat_interleave(theirs)
        return Exchange.apply(self.experts(arrived, local), receive, send)


class Model(nn.Module):
    """A model of two blocks."""

    def __init__(self, rank: int, world: int, bug: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.blocks = nn.ModuleList(MoE(10 + n, rank, world, bug) for n in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x)


def clip(model, world, bug):
    """Clip by the global norm: each expert is on one rank, everything else on all."""
    experts = [p.grad for name, p in model.named_parameters() if ".experts." in name]
    dense = [p.grad for name, p in model.named_parameters() if ".experts." not in name]
    total = sum(g.square().sum() for g in experts)
    rest = sum(g.square().sum() for g in dense)
    if bug == "norm-twice":
        total = total + rest
    if world > 1 and bug != "local-norm":
        dist.all_reduce(total)
    norm = (total if bug == "norm-twice" else total + rest).sqrt()
    for gradient in experts + dense:
        gradient.mul_(min(1.0, MAX_NORM / (norm.item() + 1e-6)))
    return norm.item()


def wrap(model, bug):
    """Wrap everything except the experts in DDP."""
    ignored = [name for name, _ in model.named_parameters() if ".experts." in name]
    if bug == "router":
        ignored += [name for name, _ in model.named_parameters() if ".router." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return DistributedDataParallel(model)


def accumulate(wrapped, own, optimizer, scheduler, bug, dtype):
    """Run the micro-batches of this rank and return their mean loss."""
    total = 0.0
    for number, part in enumerate(own.chunk(MICRO_BATCHES)):
        if bug == "zero-grad":
            optimizer.zero_grad()
        last = number == MICRO_BATCHES - 1
        is_held = hasattr(wrapped, "no_sync") and not last and bug != "zero-grad"
        with wrapped.no_sync() if is_held else nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "mixed"):
                logits = wrapped(part[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten())
            (loss if bug == "divisor" else loss / MICRO_BATCHES).backward()
        total += loss.item() / MICRO_BATCHES
        if bug == "scheduler":
            scheduler.step()
    return total


def train(options, rank, world, bug):
    """Train."""
    torch.manual_seed(3)
    model = Model(rank, world, bug)
    wrapped = wrap(model, bug) if world > 1 else model
    named = [
        (n, p) for n, p in model.named_parameters() if bug != "forgotten" or not n.endswith("experts.down")
    ]
    optimizer = torch.optim.AdamW([p for _, p in named], lr=1e-2, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    data = torch.Generator().manual_seed(7)
    for step in range(options.steps):
        batch = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=data)
        if bug == "data" and rank == 1:
            batch = batch.roll(3, 0)
        share = ROWS // world
        own = batch[rank * share : (rank + 1) * share]
        loss = accumulate(wrapped, own, optimizer, scheduler, bug, options.dtype)
        for name, p in model.named_parameters():
            if world > 1 and ".experts." in name and bug != "experts" and p.grad is not None:
                p.grad /= world
        norm = clip(model, world, bug)
        if bug == "late-zero":
            optimizer.zero_grad()
        if step == options.die_at and rank == world - 1:
            raise RuntimeError("the script died on purpose")
        optimizer.step()
        if bug != "scheduler":
            scheduler.step()
        if bug not in ("no-zero", "late-zero"):
            optimizer.zero_grad()
        if world > 1:
            whole = torch.tensor(loss, dtype=torch.float64)
            dist.all_reduce(whole)
            loss = whole.item() / world
        if rank == 0:
            sys.stdout.write(f"step {step} loss {loss:.7f} norm {norm:.7f}\n")


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--bug", default="")
    arguments.add_argument("--steps", type=int, default=2)
    arguments.add_argument("--die-at", type=int, default=-1)
    arguments.add_argument("--dtype", choices=("float32", "mixed"), default="float32")
    arguments.add_argument("--exit", type=int, default=0)
    options = arguments.parse_args()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    train(options, rank, world, options.bug if world > 1 else "")
    if world > 1:
        dist.destroy_process_group()
    raise SystemExit(options.exit)


if __name__ == "__main__":
    main()
