"""From the model of one device to that of a rank, and the reduction of its gradients."""

import torch
import torch.distributed as dist
from torch import nn

from sorrel.comms import reduce_
from sorrel.grid import DATA, EXPERT, EXPERT_COPIES, Grid, install
from sorrel.layers import GatedFFN, LatentAttention
from sorrel.model import Table
from sorrel.moe import Experts


def cut(module, name, dim, axes, grid, *, rank=None):
    """Replace a parameter by this rank's block along a dim."""
    ranks = grid.size(*axes)
    if ranks == 1:
        return
    whole = getattr(module, name).detach()
    block = whole.chunk(ranks, dim)[grid.rank(*axes) if rank is None else rank]
    parameter = nn.Parameter(block.clone(memory_format=torch.contiguous_format))
    parameter.cut = tuple(axis for axis in axes if grid.size(axis) > 1)
    setattr(module, name, parameter)


def is_cut(parameter, axis):
    return axis in getattr(parameter, "cut", ())


def parallelize(model, mesh, *, variant="", zero=False):
    """Return the model of this rank, and the function that completes its gradients.

    With `zero` the step reduces gradients over the ranks with other tokens.
    """
    grid = Grid(mesh, variant)
    install(model, grid)
    for module in model.modules():
        if isinstance(module, LatentAttention):
            cut(module.q_up, "weight", 0, ("tp",), grid)
            cut(module.kv_up, "weight", 0, ("tp",), grid)
            cut(module.out, "weight", 1, ("tp",), grid)
        elif isinstance(module, GatedFFN):
            cut(module.gate, "weight", 0, ("tp",), grid)
            cut(module.up, "weight", 0, ("tp",), grid)
            cut(module.down, "weight", 1, ("tp",), grid)
        elif isinstance(module, Table):
            cut(module, "weight", 0, ("tp",), grid)
        elif isinstance(module, Experts):
            rank = grid.rank(*EXPERT)  # anchor: expert-rank
            if grid.has("sorrel-expert-rank"):
                rank = grid.rank("tp") * grid.size("dp_shard") + grid.rank(
                    "dp_shard"
                )  # plant: sorrel-expert-rank
            cut(module, "gate_up", 0, EXPERT, grid, rank=rank)
            cut(module, "down", 0, EXPERT, grid, rank=rank)
    if model.ema is not None:
        model.ema.start(model)
    buckets = Buckets(model, grid)

    def finish():
        add_over_tp(model, grid)
        if zero:
            return
        buckets.reduce()

    return model, finish


@torch.no_grad()
def add_over_tp(model, grid):
    """Add up gradients of parameters that each rank of `tp` used on its part of the positions."""
    tp = grid.group("tp")
    if tp is None:
        return
    named = [(n, p) for n, p in model.named_parameters() if not is_cut(p, "tp")]  # anchor: over-tp
    if grid.has("sorrel-tp-layers"):
        named = [(n, p) for n, p in named if "layers." in n or "ahead." in n]  # plant: sorrel-tp-layers
    for _, parameter in named:
        reduce_(parameter.grad, tp)
    if grid.has("sorrel-tp-again"):
        for name, parameter in named:
            if "q_norm" in name or "kv_norm" in name:
                reduce_(parameter.grad, tp)  # plant: sorrel-tp-again


class Buckets:
    """Averages gradients over the ranks with other tokens, in buckets whose reductions run together."""

    def __init__(self, model, grid, limit=6000):
        self.grid, self.limit = grid, limit
        named = list(model.named_parameters())
        experts = [p for n, p in named if ".experts." in n]
        others = [p for n, p in named if ".experts." not in n]
        self.plans = [(b, DATA) for b in self.divide(others)]
        copies = EXPERT_COPIES if grid.size(*EXPERT) > 1 else DATA
        self.plans += [(b, copies) for b in self.divide(experts)]
        self.flats = {}

    def divide(self, parameters):
        """Return lists of parameters of about equal size."""
        elements = sum(p.numel() for p in parameters)
        count = -(-elements // self.limit)
        buckets = [[]]
        for parameter in parameters:
            filled = sum(p.numel() for p in buckets[-1])
            if filled >= elements / count and len(buckets) < count:
                buckets.append([])
            buckets[-1].append(parameter)
        return buckets

    def flat(self, index, bucket):
        """Return the buffer of a bucket."""
        elements = sum(p.numel() for p in bucket)
        if self.grid.has("sorrel-bucket-memory"):
            index = 0  # plant: sorrel-bucket-memory
        if index not in self.flats or self.flats[index].numel() < elements:
            dtype = bucket[0].dtype  # anchor: flat-dtype
            if self.grid.has("sorrel-bucket-dtype"):
                dtype = torch.float32  # plant: sorrel-bucket-dtype
            self.flats[index] = bucket[0].new_zeros(elements, dtype=dtype)
        return self.flats[index][:elements]

    @torch.no_grad()
    def reduce(self):
        grid, ranks = self.grid, self.grid.size(*DATA)
        if grid.has("sorrel-same-single"):
            for bucket, axes in self.plans:
                for parameter in bucket:
                    parameter.grad.copy_(reduce_(parameter.grad.clone(), grid.group(*axes)) / ranks)
            return
        if ranks == 1:
            return
        launched = []
        for index, (bucket, axes) in enumerate(self.plans):
            flat, group, work = self.flat(index, bucket), grid.group(*axes), None
            torch.cat([p.grad.flatten() for p in bucket], out=flat)
            if group is not None:
                work = dist.all_reduce(flat, group=group, async_op=True)
            launched.append((bucket, flat, work, axes))
        waited = launched  # anchor: waited
        if grid.has("sorrel-bucket-last"):
            waited = launched[:-1]  # plant: sorrel-bucket-last
        for *_, work, _ in waited:
            if work is not None:
                work.wait()
        for bucket, flat, _, axes in launched:
            divisor = ranks  # anchor: divisor
            if grid.has("sorrel-expert-mean"):
                divisor = grid.size(*axes)  # plant: sorrel-expert-mean
            start = 0
            for parameter in bucket:
                part = flat[start : start + parameter.numel()]
                parameter.grad.copy_(part.view_as(parameter) / divisor)
                start += parameter.numel()
