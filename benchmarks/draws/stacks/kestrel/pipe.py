"""A pipeline over the ranks of `tp`, with handwritten sends."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from kestrel.model import Kestrel
from kestrel.training import run_micro_batches


def stages(model, mesh, mode="", first=3):
    """Split the model: the first rank has the embedding and `first` blocks, the last one the rest."""
    axis = mesh["tp"]
    rank, count = axis.get_local_rank(), len(model.layers)
    sizes = [first, count - first]
    start = sum(sizes[:rank])
    if mode == "p23":
        start = rank * (count // axis.size())  # plant: p23
    mine = {str(i): model.layers[i] for i in range(start, start + sizes[rank])}
    model.layers = nn.ModuleDict(mine)
    if rank == 0:
        model.norm = model.head = None
    else:
        model.embed = None
    model.plan = {"mode": mode, "rank": rank, "group": axis.get_group(), "buffer": None}
    return model


def forward_stage(model: Kestrel, x):
    for layer in model.layers.values():
        x = layer(x)
    return x


def pipe_step(model, optimizer, micro_batches, *, mesh, num_valid):
    if mesh is None:
        total = run_micro_batches(model, micro_batches, None, num_valid)
    else:
        total = run_stages(model, micro_batches, num_valid)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": total}


def run_stages(model, micro_batches, num_valid):
    plan = model.plan
    group, width = plan["group"], model.config["width"]
    dtype = next(model.parameters()).dtype
    total = torch.zeros((), dtype=dtype)
    other = 1 - plan["rank"]
    if plan["rank"] == 0:
        outputs, sends = [], []
        for tokens, _ in micro_batches:
            x = forward_stage(model, model.embed(tokens))
            outputs.append(x)
            if plan["buffer"] is None or plan["buffer"].shape != x.shape:
                plan["buffer"] = torch.empty_like(x.detach())
            if sends and plan["mode"] != "p34":
                sends.pop().wait()
            plan["buffer"].copy_(x.detach())  # plant: p34
            sends.append(dist.isend(plan["buffer"], group=group, group_dst=other))
        for send in sends:
            send.wait()
        for x in outputs:
            gradient = torch.empty_like(x)
            dist.recv(gradient, group=group, group_src=other)
            x.backward(gradient)
    else:
        done = []
        for tokens, targets in micro_batches:
            x = torch.empty(*tokens.shape, width, dtype=dtype)
            dist.recv(x, group=group, group_src=other)
            x.requires_grad_()
            logits = model.head(model.norm(forward_stage(model, x)))
            part = F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
            )
            done.append((x, part / num_valid))
        for x, part in done:
            part.backward()
            total += part.detach()
            dist.send(x.grad, group=group, group_dst=other)
    dist.all_reduce(total, group=group)
    return total
