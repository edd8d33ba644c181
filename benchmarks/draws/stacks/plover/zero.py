"""ZeRO-3 by hand: a rank has some rows of each parameter, and modules gather the others when they run."""

import torch
import torch.distributed as dist
from torch import nn

from plover.state import Parallel, attach, axis_of


class Handle:
    """A parameter that is cut by rows, the last block filled up with zeros for collectives."""

    def __init__(self, parameter, ps, *, keep):
        self.axis, self.ps, self.keep = ps.data, ps, keep
        self.rows, self.tail = parameter.shape[0], parameter.shape[1:]
        self.block = -(-self.rows // self.axis.size)
        start = self.axis.rank * self.block
        self.shard = nn.Parameter(parameter.detach()[start : start + self.block].clone())
        self.shard.axis = self.axis
        self.cached = None

    def fill(self, rows):
        """Return a block filled up to the size of all blocks."""
        missing = self.block - rows.shape[0]
        return torch.cat([rows, rows.new_zeros(missing, *self.tail)]) if missing else rows.contiguous()

    def gather(self):
        return GatherRows.apply(self.shard, self)

    def reduce(self, gradient):
        """Return the mean over ranks of the gradient of this rank's rows."""
        whole = gradient.new_zeros(self.block * self.axis.size, *self.tail)
        whole[: self.rows] = gradient
        mine = gradient.new_empty(self.block, *self.tail)
        dist.reduce_scatter_tensor(mine, whole, group=self.axis.group)
        mine = mine[: self.shard.shape[0]]
        if self.ps.using("plover-even-mean"):
            return (
                mine / self.axis.size if self.rows % self.axis.size == 0 else mine
            )  # plant: plover-even-mean
        return mine / self.axis.size


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, handle):
        ctx.handle = handle
        if handle.cached is not None:
            return handle.cached.clone()
        parts = [torch.empty_like(handle.fill(shard)) for _ in range(handle.axis.size)]
        dist.all_gather(parts, handle.fill(shard), group=handle.axis.group)
        whole = torch.cat(parts)[: handle.rows]
        if handle.keep:
            handle.cached = whole
        return whole.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.handle.reduce(gradient.contiguous()), None


def shard_module(module, ps, *, keep):
    """Cut the parameters that a module has itself, and gather them around its forward pass."""
    handles = {}
    for name, parameter in list(module.named_parameters(recurse=False)):
        handles[name] = Handle(parameter, ps, keep=keep)
        setattr(module, name, handles[name].shard)
    if not handles:
        return []

    def before(_module, _inputs):
        for name, handle in handles.items():
            module.__dict__[name] = handle.gather()

    def after(_module, _inputs, _output):
        for name in handles:
            del module.__dict__[name]

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    return list(handles.values())


def gathered_table(model, embed, ps):
    """Return a function for the head, which uses the table outside of the module that has it."""
    if ps.using("plover-tie-detached"):
        return lambda: embed.gather().detach()  # plant: plover-tie-detached
    return embed.gather


def zero3(model, mesh, *, bug="", keep=False):
    """Cut all parameters over `dp_shard`. `keep` gathers once for all micro-batches of a step."""
    ps = Parallel(bug=bug, data=axis_of(mesh, "dp_shard"))
    attach(model, ps)
    handles = []
    for module in list(model.modules()):
        handles += shard_module(module, ps, keep=keep)
    (table,) = [handle for handle in handles if handle.shard is model.embed.weight]
    model.embed.table = gathered_table(model, table, ps)

    def finish():
        """Forget what was gathered: the optimizer changes it."""
        if ps.using("plover-stale-gather"):
            owned = {id(p) for p in model.blocks.parameters()}  # plant: plover-stale-gather
        else:
            owned = {id(p) for p in model.parameters()}
        for handle in handles:
            if id(handle.shard) in owned:
                handle.cached = None

    return model, finish
