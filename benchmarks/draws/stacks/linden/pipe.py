"""A pipeline over the ranks of `tp`, one forward and one backward pass in turn, with a table on both ends."""

import torch
import torch.distributed as dist
from torch import nn

from linden.moe import move_bias
from linden.net import end, run_blocks
from linden.packing import locate
from linden.rules import clip
from linden.step import backward, count_tokens
from linden.topo import all_sum, make_topo
from linden.vocab import embed


def stages(net, mesh, *, trial=""):
    topo = net.topo = make_topo(mesh, trial, pipe=True)
    pp, depth = topo.pp, net.sizes.depth
    each = depth // pp.size
    net.blocks = range(pp.rank * each, (pp.rank + 1) * each)
    first, last = pp.rank == 0, pp.rank == pp.size - 1
    kept = tuple(f"b{i}_" for i in net.blocks)
    for name in [*dict(net.named_parameters()), *dict(net.named_buffers())]:
        is_block = name[0] == "b" and name[1].isdigit()
        if is_block and not name.startswith(kept):
            delattr(net, name)
    if not last:
        del net.norm_end, net.head_bias
    if not first and not last:
        del net.table
    if last and topo.on("linden-table-drawn"):
        noise = torch.randn(net.table.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        net.table = nn.Parameter((noise * 0.2).to(net.table.dtype))  # plant: linden-table-drawn

    @torch.no_grad()
    def finish():
        add_tables(net)
        for name, parameter in net.named_parameters():
            if topo.on("linden-pipe-blocks") and name[0] != "b":
                continue  # plant: linden-pipe-blocks
            all_sum(parameter.grad, topo.data)

    return net, finish


def add_tables(net):
    """Add up the gradients of the table of the first and the last stage."""
    pp = net.topo.pp
    if pp.rank not in (0, pp.size - 1):
        return
    other = pp.size - 1 - pp.rank
    theirs = torch.empty_like(net.table.grad)
    mine = net.table.grad.clone()
    work = dist.isend(mine, group=pp.pg, group_dst=other)
    dist.recv(theirs, group=pp.pg, group_src=other)
    work.wait()
    net.table.grad.add_(theirs)


class Stage:
    """The passes of a rank in one step."""

    def __init__(self, net, micro_batches):
        self.net, self.batches, self.pp, self.topo = net, micro_batches, net.topo.pp, net.topo
        self.count = count_tokens(micro_batches, net.topo)
        self.first, self.last = self.pp.rank == 0, self.pp.rank == self.pp.size - 1
        self.open, self.sends, self.total = [], [], 0.0

    def send(self, x, to):
        x = x.detach().contiguous()
        self.sends.append((dist.isend(x, group=self.pp.pg, group_dst=to), x))

    def receive(self, origin, like):
        shape = *like.shape, self.net.sizes.width
        x = torch.empty(shape, dtype=next(self.net.parameters()).dtype)
        dist.recv(x, group=self.pp.pg, group_src=origin)
        return x

    def forward(self, index):
        net, (tokens, targets) = self.net, self.batches[index]
        entered = None
        if self.first:
            x = embed(net.table, tokens, net.sizes, self.topo)
        else:
            x = entered = self.receive(self.pp.rank - 1, tokens).requires_grad_()
        x, value = run_blocks(net, x, locate(tokens, net.sizes, self.topo))
        if self.last:
            value = value + end(net, x, targets)
        else:
            self.send(x, self.pp.rank + 1)
        value = value / self.count
        self.total = self.total + value.detach()
        self.open.append((entered, x, value, tokens))

    def backward(self):
        oldest = 0  # anchor: oldest
        if self.topo.on("linden-newest-first"):
            oldest = -1  # plant: linden-newest-first
        entered, x, value, tokens = self.open.pop(oldest)
        if self.last:
            value.backward()
        else:
            grad = self.receive(self.pp.rank + 1, tokens)
            outputs = [(x, grad)]
            if value.requires_grad:
                outputs.append((value, None))
            torch.autograd.backward([out for out, _ in outputs], [grad for _, grad in outputs])
        if entered is not None:
            self.send(entered.grad, self.pp.rank - 1)

    def run(self):
        ahead = min(self.pp.size - 1 - self.pp.rank, len(self.batches))
        for index in range(len(self.batches)):
            self.forward(index)
            if index >= ahead:
                self.backward()
        while self.open:
            self.backward()
        for work, _ in self.sends:
            work.wait()
        return self.total


@torch.no_grad()
def clip_stages(net):
    """Clip by the norm over all stages, in which the table counts once."""
    topo = net.topo
    square = 0.0
    for name, parameter in net.named_parameters():
        twice = name == "table" and topo.pp.rank > 0  # anchor: table-once
        if topo.on("linden-table-twice"):
            twice = False  # plant: linden-table-twice
        if not twice:
            square = square + parameter.grad.square().sum()
    norm = all_sum(square, topo.pp).sqrt()
    factor = (net.sizes.max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in net.parameters():
        parameter.grad.mul_(factor)
    return norm, factor


def pipe_step(net, optimizer, micro_batches, *, scheduler, finish):
    topo = net.topo
    if topo.pp.size == 1:
        total = backward(net, micro_batches)
        norm, factor = clip(net)
    else:
        total = Stage(net, micro_batches).run()
        finish()
        norm, factor = clip_stages(net)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    move_bias(net)
    return {"loss": all_sum(total, topo.pp, topo.data), "gradient_norm": norm, "clip_coefficient": factor}
