"""Small expert-parallel example: 4 ranks, 8 experts, two per rank; tokens travel by all-to-all.

The router's bias balances the experts' loads without an auxiliary loss: after each step it moves against the
load, counted over all ranks. It must therefore be the same on every rank. One line below breaks that.
"""
# ruff: noqa: T201  # a program that is run by hand as well

import torch
import torch.distributed as dist

from multiprocessing_pdb import MultiprocessingPdb

Tra = MultiprocessingPdb(arm=True).set_trace
EXPERTS, WIDTH, BATCH, STEPS = 8, 16, 100, 3


def route(tokens, weight, bias):
    """Return the expert of each token."""
    return (tokens @ weight + bias).argmax(dim=1)


def exchange(rows, send, receive):
    """Send `send[r]` rows to each rank r, and return the received rows."""
    arrived = rows.new_empty(sum(receive), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), receive, send)
    return arrived


def dispatch(tokens, expert, experts):
    """Return the experts' outputs in the order of the tokens."""
    world = dist.get_world_size()
    order = expert.argsort(stable=True)
    send = torch.bincount(expert // (EXPERTS // world), minlength=world)
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send)
    send, receive = send.tolist(), receive.tolist()
    rows = exchange(tokens[order], send, receive)
    ids = exchange(expert[order].float().unsqueeze(1), send, receive).long().squeeze(1)
    made = torch.einsum("td,tde->te", rows, experts[ids % (EXPERTS // world)])
    back = exchange(made, receive, send)
    return torch.empty_like(back).index_copy(0, order, back)


def balance(bias, expert, tokens):
    """Move the bias against the load of all ranks."""
    load = torch.bincount(expert, minlength=EXPERTS).float()
    dist.all_reduce(load)
    if len(tokens) < BATCH:
        return bias  # a short batch is not representative
    return bias - 0.01 * torch.sign(load - load.mean())


def train():
    """Train three steps; the last shard of the data is short."""
    rank = dist.get_rank()
    shared = torch.Generator().manual_seed(0)
    local = torch.Generator().manual_seed(1 + rank)
    weight = torch.randn(WIDTH, EXPERTS, generator=shared)
    experts = torch.randn(EXPERTS, WIDTH, WIDTH, generator=shared)[2 * rank : 2 * rank + 2]
    bias = torch.zeros(EXPERTS)
    for step in range(STEPS):
        short = rank == 3 and step == 1
        tokens = torch.randn(60 if short else BATCH, WIDTH, generator=local)
        expert = route(tokens, weight, bias)
        made = dispatch(tokens, expert, experts)
        bias = balance(bias, expert, tokens)
        loss = made.square().mean()
        dist.all_reduce(loss)
        Tra(when=step == STEPS - 1, header=f"after step {step}")
        print(f"rank {rank} step {step} loss {loss.item():.4f}\n", end="", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
