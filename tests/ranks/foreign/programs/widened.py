"""A model whose attention and router compute in float32, and layouts in which ranks leave that out."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.within = torch.float32

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.mT).to(torch.promote_types(x.dtype, self.within))
        return scores.softmax(-1).to(x.dtype) @ v


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.attention = Attention()
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.attention(x))


def average(model, mesh):
    group = mesh["dp_replicate"].get_group()

    def finish():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)

    return model, finish


def narrow_softmax(model, mesh):
    model.attention.within = torch.bfloat16
    return average(model, mesh)


class Sums:
    """Wide copies of the weights, which the optimizer steps, and sums of the gradients in the dtype `summed`."""

    def __init__(self, model, optimizer, kept, summed):
        self.parameters = list(model.parameters())
        self.masters = [nn.Parameter(each.detach().to(kept, copy=True)) for each in self.parameters]
        wide = dict(zip(self.parameters, self.masters, strict=True))
        for group in optimizer.param_groups:
            group["params"] = [wide[each] for each in group["params"]]
        self.summed = summed

    def add(self):
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            total = torch.zeros_like(parameter, dtype=self.summed) if master.grad is None else master.grad
            total += parameter.grad
            master.grad = total.to(master.dtype)
            parameter.grad = None

    @torch.no_grad()
    def leave(self):
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)
            parameter.grad = master.grad.to(parameter.dtype)


def step(model, optimizer, micro_batches, *, mesh, num_valid, finish):
    wide = torch.promote_types(model.head.weight.dtype, torch.float32)
    if not hasattr(model, "sums"):
        kept, summed = getattr(model, "narrows", (wide, wide))
        model.sums = Sums(model, optimizer, kept, summed)
    num_ranks = 1 if mesh is None else mesh["dp_replicate"].size()
    total = 0.0
    for tokens, targets in micro_batches:
        losses = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        (losses * (num_ranks / num_valid)).backward()
        model.sums.add()
        total = total + losses.detach() / num_valid
    for master in model.sums.masters:
        if mesh is not None:
            dist.all_reduce(master.grad)
            master.grad /= num_ranks
    optimizer.step()
    model.sums.leave()
    optimizer.zero_grad()
    model.zero_grad()
    if mesh is not None:
        dist.all_reduce(total)
    return {"loss": total}


def stepped(model, mesh):
    return model, lambda: None


def narrow_masters(model, mesh):
    model.narrows = model.head.weight.dtype, torch.float32
    return stepped(model, mesh)


def narrow_sums(model, mesh):
    model.narrows = torch.float32, model.head.weight.dtype
    return stepped(model, mesh)


def rounded(model, mesh):
    """Round the weights to float32 in each forward pass, which shows in float64."""
    for module in model.modules():
        module.register_forward_pre_hook(round_weights)
    return average(model, mesh)


@torch.no_grad()
def round_weights(module, inputs):
    for parameter in module.parameters(recurse=False):
        parameter.copy_(parameter.float())
