"""Two stages of a pipeline, one forward and one backward in turn. The last stage has a copy of the table, which the
block for the token after the next reads."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from osier.data import read_stream
from osier.dims import ParallelDims, group_of, install
from osier.ops import all_reduce
from osier.trainer import run_passes, update


def stages(model, mesh, *, flag="", first=2):
    """The ranks of `tp` are stages: the first has the table and `first` layers, the last all else."""
    dims = ParallelDims(pp=group_of(mesh, "tp"), flag=flag)
    install(model, dims)
    names = range(first) if dims.pp.rank == 0 else range(first, len(model.layers))
    model.layers = Stage({str(i): model.layers[i] for i in names})
    if dims.pp.rank == 0:
        model.norm = model.head = model.ahead = None
    for name, parameter in model.named_parameters():
        if name != "embed.table" or dims.has("osier-pipe-norm"):  # plant: osier-pipe-norm
            parameter.cut_over = dims.pp
    return model, lambda: sum_table(model)


class Stage(nn.ModuleDict):
    def __iter__(self):
        return iter(self.values())


def sum_table(model) -> None:
    """Add up the gradients of both copies of the table."""
    if model.dims.has("osier-pipe-table"):
        return  # plant: osier-pipe-table
    dist.all_reduce(model.embed.table.grad, group=model.dims.pp.pg)


def run_first(model, micro_batches, num_valid: int) -> torch.Tensor:
    group, total, waiting, sends = model.dims.pp.pg, torch.zeros(()), [], []
    for tokens, _ in micro_batches:
        x = model.trunk(model.embed(tokens), read_stream(tokens, model.c.special, model.dims))
        sends.append(dist.isend(x.detach().contiguous(), group=group, group_dst=1))
        waiting.append((x, model.balance() / num_valid))
        total = total + waiting[-1][1].detach()
        if len(waiting) > 1 and not model.dims.has("osier-same-pipe"):
            oldest = -1 if model.dims.has("osier-pipe-order") else 0  # plant: osier-pipe-order
            finish_first(*waiting.pop(oldest), model.dims)
    while waiting:
        finish_first(*waiting.pop(0), model.dims)
    for send in sends:
        send.wait()
    return total


def finish_first(x: torch.Tensor, balance: torch.Tensor, dims: ParallelDims) -> None:
    """Run the backward pass of a micro-batch with the gradient from the last stage."""
    grad = torch.empty_like(x)
    dist.recv(grad, group=dims.pp.pg, group_src=1)
    if dims.has("osier-pipe-balance"):
        x.backward(grad)  # plant: osier-pipe-balance
    else:
        torch.autograd.backward([x, balance], [grad, None])


def run_last(model, micro_batches, num_valid: int) -> torch.Tensor:
    group, total = model.dims.pp.pg, torch.zeros(())
    like = model.embed.table
    sends, stream = [], None
    for tokens, targets in micro_batches:
        x = like.new_empty(*tokens.shape, model.c.width)
        dist.recv(x, group=group, group_src=0)
        x.requires_grad_()
        if stream is None or not model.dims.has("osier-pipe-stream"):  # plant: osier-pipe-stream
            stream = read_stream(tokens, model.c.special, model.dims)
        terms = model.head_terms(model.trunk(x, stream), tokens, targets, stream)
        value = (sum(terms.values()) + model.balance()) / num_valid
        value.backward()
        sends.append(dist.isend(x.grad, group=group, group_dst=0))
        total = total + value.detach()
    for send in sends:
        send.wait()
    return total


def pipe_step(model, optimizer, micro_batches, *, num_valid, scheduler, clip_norm, finish):
    pp = model.dims.pp
    run = run_passes if pp.alone else (run_first, run_last)[pp.rank]
    total = run(model, micro_batches, num_valid)
    finish()
    told = update(model, optimizer, scheduler, clip_norm)
    return {"loss": all_reduce(total, pp), **told}
