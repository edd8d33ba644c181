"""Context parallelism by hand: each rank has a run of positions; keys and values are gathered or rotated."""

import torch

from plover.comm import GatherSequence, Rotate, shift
from plover.ddp import Reducer
from plover.layers import Attention, allowed, masked_scores
from plover.state import Parallel, attach, axis_of


def context(model, mesh, *, bug="", ring=False):
    """Cut the positions over `cp`."""
    ps = Parallel(bug=bug, cp=axis_of(mesh, "cp"), data=axis_of(mesh, "cp"))
    attach(model, ps)
    core = Ring(ps) if ring else Gathered(ps)
    for module in [module for module in model.modules() if isinstance(module, Attention)]:
        if ps.using("plover-window-closure"):
            module.core = lambda q, k, v, pos, _, sinks: core(
                q, k, v, pos, module.window, sinks
            )  # plant: plover-window-closure
        else:
            module.core = core
    model.positions = lambda length, device: positions_of(length, device, ps)
    model.next_tokens = lambda ids, fill: next_tokens(ids, fill, ps)
    reducer = Reducer(list(model.parameters()), ps.data, ps)
    return model, reducer.finish


def positions_of(length, device, ps):
    return torch.arange(length, device=device) + ps.cp.rank * length


def next_tokens(ids, fill, ps):
    """Return the ids one position further: the last one is the first of the next rank."""
    if ps.using("plover-roll-local"):
        first = ids[:, :1]  # plant: plover-roll-local
    else:
        first = shift(ids[:, :1].contiguous(), ps.cp, -1)
    last = ps.cp.rank == ps.cp.size - 1
    if last and not ps.using("plover-halo-last"):  # plant: plover-halo-last
        first = torch.full_like(first, fill)
    return torch.cat([ids[:, 1:], first], 1)


class Gathered:
    """Attention to the keys and values of all ranks."""

    def __init__(self, ps):
        self.ps = ps

    def __call__(self, q, k, v, positions, window, sinks):
        axis, ps = self.ps.cp, self.ps
        k = GatherSequence.apply(k, axis, 1, ps)
        v = GatherSequence.apply(v, axis, 1, ps)
        everywhere = torch.arange(k.shape[1], device=k.device)
        mask = allowed(positions, everywhere, window)
        if ps.using("plover-window-local"):
            rows = torch.arange(len(positions), device=k.device)
            inside = rows[:, None] - everywhere < window  # plant: plover-window-local
            mask = allowed(positions, everywhere, k.shape[1]) & inside
        scores = masked_scores(q, k, mask)
        sink = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)


class Ring:
    """Attention to one block of keys after the other, with a running softmax."""

    def __init__(self, ps):
        self.ps = ps

    def __call__(self, q, k, v, positions, window, sinks):
        axis, ps, length = self.ps.cp, self.ps, q.shape[1]
        top = sinks[None, :, None].expand(q.shape[0], -1, length).detach()
        total = (sinks[None, :, None] - top).exp()
        out = torch.zeros_like(q).transpose(1, 2)
        for step in range(axis.size):
            origin = (axis.rank - step) % axis.size
            keys = torch.arange(length, device=q.device) + origin * length
            mask = allowed(positions, keys, window) & self.is_seen(origin, length, window)
            scores = masked_scores(q, k, mask)
            new = torch.maximum(top, scores.detach().amax(-1))
            scale = (top - new).exp()
            weights = (scores - new[..., None]).exp()
            part = torch.einsum("bhqk,bkhd->bhqd", weights, v)
            if ps.using("plover-ring-rescale"):
                out = out + part  # plant: plover-ring-rescale
            else:
                out = out * scale[..., None] + part
            total = total * scale + weights.sum(-1)
            if ps.using("plover-ring-sink") and step:
                total = total + (sinks[None, :, None] - new).exp()  # plant: plover-ring-sink
            top = new
            if step + 1 < axis.size:
                k, v = Rotate.apply(k, axis, ps), Rotate.apply(v, axis, ps)
        return (out / total[..., None]).transpose(1, 2)

    def is_seen(self, origin, length, window):
        """Return whether a query of this rank can see a key of a block. All blocks stay in the graph: the
        backward pass sends their gradients on."""
        rank = self.ps.cp.rank
        if origin > rank:
            return False
        first, last = rank * length, origin * length + length - 1
        if self.ps.using("plover-ring-skip"):
            last = origin * length  # plant: plover-ring-skip
        return first - last < window
