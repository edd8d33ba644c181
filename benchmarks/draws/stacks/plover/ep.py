"""Expert parallelism by hand: the data ranks have different experts, and rows are exchanged."""

import torch
import torch.distributed as dist
from torch import nn

from plover.comm import AllToAll
from plover.ddp import Reducer
from plover.moe import MoE, combine, sort_by_expert
from plover.state import Parallel, attach, axis_of


def experts(model, mesh, *, bug="", blocks_of=0):
    """Spread the experts over `dp_shard`; all else is replicated there."""
    ps = Parallel(bug=bug, data=axis_of(mesh, "dp_shard"))
    attach(model, ps)
    for block in model.blocks:
        if isinstance(block.mlp, MoE):
            spread(block.mlp, ps, blocks_of)
    dense, spread_out = [], []
    for name, parameter in model.named_parameters():
        (spread_out if is_expert(name, parameter, ps) else dense).append(parameter)
    reducer = Reducer(dense, ps.data, ps)

    def finish():
        reducer.finish()
        for parameter in spread_out:
            if parameter.grad is None:
                continue
            if ps.using("plover-expert-sum"):
                break  # plant: plover-expert-sum
            parameter.grad /= ps.data.size

    return model, finish


def is_expert(name, parameter, ps):
    if ps.using("plover-shared-name"):
        return "experts." in name  # plant: plover-shared-name
    return ".experts." in name


def spread(moe, ps, blocks_of):
    own = len(moe.experts.w1) // ps.data.size
    start = ps.data.rank * own
    if ps.using("plover-expert-start"):
        start = ps.data.rank  # plant: plover-expert-start
    for name, weight in list(moe.experts.named_parameters()):
        mine = nn.Parameter(weight.detach()[start : start + own].clone())
        mine.axis = ps.data
        setattr(moe.experts, name, mine)
    moe.dispatch = Exchange(own, ps, blocks_of)


def local_order(counts):
    """Return the order by expert of rows that came by rank, then expert; `counts` (ranks, experts)."""
    ranks, own = counts.shape
    ids = torch.arange(own).repeat(ranks).repeat_interleave(counts.flatten())
    return ids.argsort(stable=True)


class Exchange:
    """Sends rows to the ranks of their experts and back."""

    def __init__(self, own, ps, blocks_of):
        self.own, self.ps, self.blocks_of = own, ps, blocks_of

    def __call__(self, experts, x, weights, chosen):
        ps, axis = self.ps, self.ps.data
        order, counts = sort_by_expert(chosen, self.own * axis.size)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=axis.group)
        arriving = arriving.view(axis.size, self.own)
        send, receive = counts.view(axis.size, -1).sum(1).tolist(), arriving.sum(1).tolist()
        rows = AllToAll.apply(x[order // chosen.shape[-1]], send, receive, axis)
        if ps.using("plover-counts-view"):
            inner = local_order(arriving.view(self.own, axis.size).t())  # plant: plover-counts-view
        else:
            inner = local_order(arriving)
        y = self.run(experts, rows[inner], arriving.sum(0).tolist())
        if ps.using("plover-unsort"):
            y = y[inner]  # plant: plover-unsort
        else:
            y = torch.empty_like(y).index_copy(0, inner, y)
        y = AllToAll.apply(y, receive, send, axis)
        if ps.using("plover-weights-order"):
            scaled = y * weights.flatten()[:, None]  # plant: plover-weights-order
            return torch.zeros_like(x).index_add(0, order // chosen.shape[-1], scaled)
        return combine(y, order, weights)

    def run(self, experts, rows, counts):
        """Run the experts, on blocks of equal size if asked to; rows that fill a block up are dropped."""
        if not self.blocks_of:
            return experts(rows, counts)
        padded, kept, sizes, offset = [], [], [], 0
        for part in rows.split(counts):
            missing = -len(part) % self.blocks_of
            filling = rows[:1].expand(missing, -1)
            padded += [part, filling]
            start = offset
            if self.ps.using("plover-pad-offset"):
                start = sum(counts[: len(sizes)])  # plant: plover-pad-offset
            kept.append(torch.arange(start, start + len(part)))
            sizes.append(len(part) + missing)
            offset += sizes[-1]
        return experts(torch.cat(padded), sizes)[torch.cat(kept)]
