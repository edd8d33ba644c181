"""Tensor parallelism by hand: heads, hidden units and the vocabulary are cut over `tp`, and the residual
stream by positions between the layers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from plover.comm import GatherSequence, Reduce, ScatterSequence, all_gather, all_reduce
from plover.ddp import Reducer
from plover.moe import MoE
from plover.state import Parallel, attach, axis_of

COLUMN = ("wq", "wk", "wv", "w1", "w3")
ROW = ("wo", "w2")


def tensor(model, mesh, *, bug=""):
    """Cut a model over `tp`, and reduce gradients over the data axis where there is one."""
    ps = Parallel(bug=bug, tp=axis_of(mesh, "tp"), data=axis_of(mesh, "dp_replicate"))
    attach(model, ps)
    cut_model(model, ps)
    reducer = None
    if ps.data.size > 1:
        reducer = Reducer(list(model.parameters()), reduce_axis(mesh, ps), ps)

    def finish():
        if reducer is not None:
            reducer.finish()
        sync_partial(model, ps)

    return model, finish


def reduce_axis(mesh, ps):
    if ps.using("plover-dp-group"):
        return axis_of(mesh, "tp")  # plant: plover-dp-group
    return ps.data


def cut(parameter, dim, axis):
    """Return this rank's block of a parameter."""
    block = nn.Parameter(parameter.detach().chunk(axis.size, dim)[axis.rank].clone())
    block.axis = axis
    return block


def cut_model(model, ps):
    def enter(x):
        return GatherSequence.apply(x, ps.tp, 1, ps)

    def leave(x):
        return ScatterSequence.apply(x, ps.tp, 1)

    for name, module in list(model.named_modules()):
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and last in COLUMN + ROW:
            module.weight = cut(module.weight, 0 if last in COLUMN else 1, ps.tp)
        elif last == "experts":
            for weight, dim in (("w1", 1), ("w3", 1), ("w2", 2)):
                setattr(module, weight, cut(getattr(module, weight), dim, ps.tp))
        elif hasattr(module, "enter") and last != "shared_experts":
            module.enter, module.leave = enter, leave
    for block in model.blocks:
        if isinstance(block.mlp, MoE) and ps.using("plover-shared-leave"):
            block.mlp.shared_experts.leave = lambda x: Reduce.apply(x, ps.tp)  # plant: plover-shared-leave
    model.embed.weight = cut(model.embed.weight, 0, ps.tp)
    model.embed.forward = VocabParallel(model.embed, ps)
    model.enter_head = enter
    model.token_losses = lambda x, table, targets: parallel_losses(x, table, targets, ps)


class VocabParallel:
    """Lookup in a table of which each rank has some rows; returns the rank's positions."""

    def __init__(self, embed, ps):
        self.embed, self.ps = embed, ps

    def __call__(self, ids):
        table, axis = self.embed.weight, self.ps.tp
        start = axis.rank * len(table)
        outside = (ids < start) | (ids >= start + len(table))
        local = (ids - start).masked_fill(outside, 0)
        rows = F.embedding(local, table)  # anchor: rows
        if not self.ps.using("plover-embed-mask"):  # plant: plover-embed-mask
            rows = rows.masked_fill(outside[..., None], 0.0)
        return ScatterSequence.apply(rows, axis, 1)


def parallel_losses(x, table, targets, ps):
    """As `token_losses`, with the logits of this rank's part of the vocabulary."""
    logits = x @ table.t()
    top = logits.detach().amax(-1)
    if not ps.using("plover-local-max"):  # plant: plover-local-max
        top = all_reduce(top, ps.tp, dist.ReduceOp.MAX)
    summed = Reduce.apply((logits - top[..., None]).exp().sum(-1), ps.tp)
    lse = summed.log() + top
    start = ps.tp.rank * len(table)
    local = targets - start
    if ps.using("plover-vocab-end"):
        here = (targets >= start) & (targets <= start + len(table))  # plant: plover-vocab-end
    else:
        here = (targets >= start) & (targets < start + len(table))
    picked = logits.gather(-1, local.clamp(0, len(table) - 1)[..., None])[..., 0]
    picked = Reduce.apply(picked * here, ps.tp)
    if ps.using("plover-z-detached"):
        return lse.detach(), lse - picked  # plant: plover-z-detached
    return lse, lse - picked


def list_partial(model, ps):
    """Return the parameters that all ranks have whole, of which each has seen a part of the work."""
    found = []
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "axis"):
            continue
        if ps.using("plover-gain-names"):
            if not name.endswith("weight") and not name.endswith("sinks"):  # plant: plover-gain-names
                continue
        if ps.using("plover-head-norms") and ".attn." in name:  # plant: plover-head-norms
            continue
        found.append(parameter)
    return found


def sync_partial(model, ps):
    """Add up the gradients of whole parameters over `tp`."""
    gradients = [parameter.grad for parameter in list_partial(model, ps)]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=ps.tp.group)
    if ps.using("plover-partial-mean"):
        flat /= ps.tp.size  # plant: plover-partial-mean
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()


def plain(model, mesh, *, bug=""):
    """The same with another gather before experts: a rewrite that changes nothing."""
    model, finish = tensor(model, mesh, bug=bug)
    axis = model.ps.tp
    for module in model.modules():
        if isinstance(module, MoE):
            module.enter = lambda x: GatherAgain.apply(x, axis)
    return model, finish


class GatherAgain(torch.autograd.Function):
    """Another way to write the gather: the sum over ranks first, then this rank's positions."""

    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return all_gather(x, axis, 1)

    @staticmethod
    def backward(ctx, gradient):
        whole = all_reduce(gradient, ctx.axis)
        size = whole.shape[1] // ctx.axis.size
        return whole.narrow(1, ctx.axis.rank * size, size), None
