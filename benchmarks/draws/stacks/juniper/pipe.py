"""An interleaved pipeline over the ranks of `tp`: each has every so-many-th of the chunks of one layer."""

import torch
import torch.distributed as dist

from juniper.experts import move_biases
from juniper.grid import Comm, add_up, install, make_grid
from juniper.parallel import cut_parameters, list_places
from juniper.seq import read
from juniper.trainer import clip, count_positions, count_targets, run_passes
from juniper.weights import load


def stages(model, mesh, *, mode=""):
    grid = make_grid(mesh, mode, pipe=True)
    install(model, grid)
    if mode != "ju81":  # plant: ju81
        cut_parameters(model, grid)  # anchor: pipe-cut
        load(model, model.source)
    pp, layers = grid.pp, model.c.layers
    each = layers // pp.size
    model.chunks = [pp.rank + v * pp.size for v in range(each)]
    names = [str(chunk) for chunk in model.chunks]  # anchor: chunk-names
    if mode == "ju70":
        names = [str(pp.rank * each + v) for v in range(each)]  # plant: ju70
    model.chunk_layers = names
    for name in list(model.blocks):
        if name not in names:
            del model.blocks[name]
    first, last = pp.rank == 0, pp.rank == pp.size - 1
    if not last:
        model.norm = model.ahead = None
    if not first and not last:
        model.table = None

    @torch.no_grad()
    def finish():
        if pp.size > 1:
            add_tables(model)
        for place in list_places(model):
            add_up(place.tensor.grad, grid.edp if place.is_expert else grid.tokens)

    return model, finish


def add_tables(model):
    """Both ends have the table. Ranks between them take part with zeros."""
    grid, c = model.grid, model.c
    held = model.table is not None
    mine = model.table.rows.grad if held else torch.zeros(c.vocab, c.width, dtype=torch.get_default_dtype())
    mine = mine.to(next(model.parameters()).dtype)
    dist.all_reduce(mine, group=grid.pp.group)
    if held:
        # Both have the sum, so that they take the same step.
        model.table.rows.grad.copy_(mine)
        if grid.mode == "ju72":
            model.table.rows.grad.div_(2)  # plant: ju72


class Passes:
    """The forward and backward passes of one step."""

    def __init__(self, model, micro_batches):
        self.model, self.batches, self.grid, self.pp = model, micro_batches, model.grid, model.grid.pp
        self.count = count_targets(micro_batches, self.grid)
        self.depth, self.each = model.c.layers, len(model.chunks)
        self.open, self.sends, self.buffers, self.value = {}, [], {}, 0.0

    def locate(self, k, *, backward):
        """Return which of this rank's chunks, and which micro-batch, pass number k is of."""
        pp = self.pp.size
        local = k % (pp * self.each) // pp
        return (self.each - 1 - local if backward else local), k // (pp * self.each) * pp + k % pp

    def tag(self, chunk, micro, backward):
        return (2 * chunk + backward) * len(self.batches) + micro

    def send(self, x, chunk, micro, *, backward):
        x = x.detach().contiguous()
        if self.grid.mode == "ju82":
            x = self.buffers.setdefault(backward, torch.empty_like(x)).copy_(x)  # plant: ju82
        to, tag = chunk % self.pp.size, self.tag(chunk, micro, backward)
        self.sends.append((dist.isend(x, group=self.pp.group, group_dst=to, tag=tag), x))

    def receive(self, chunk, micro, *, backward):
        """Return what the neighbor sent for a chunk of this rank."""
        tokens = self.batches[micro][0]
        near = chunk + 1 if backward else chunk - 1
        dtype = next(self.model.parameters()).dtype
        x = torch.empty(*tokens.shape, self.model.c.width, dtype=dtype)  # anchor: new-buffer
        if self.grid.mode == "ju69":
            x = self.buffers.setdefault((chunk, backward), x).detach()  # plant: ju69
        tag = self.tag(chunk, micro, backward)
        dist.recv(x, group=self.pp.group, group_src=near % self.pp.size, tag=tag)
        return x

    def forward(self, k):
        model, grid = self.model, self.grid
        local, micro = self.locate(k, backward=False)
        chunk = model.chunks[local]
        tokens, targets = self.batches[micro]
        if grid.mode == "ju71":
            targets = self.batches[k % len(self.batches)][1]  # plant: ju71
        seq = read(tokens, model.c, grid)
        if chunk == 0:
            x = entry = model.table(tokens)
        else:
            x = entry = self.receive(chunk, micro, backward=False).requires_grad_()
        x, term = model.run_blocks([model.chunk_layers[local]], x, seq)
        if chunk == self.depth - 1:
            terms, more = model.end(x, tokens, targets, seq)
            term = term + more + sum(terms.values())
        else:
            self.send(x, chunk + 1, micro, backward=False)
        term = term / self.count
        self.value = self.value + term.detach()
        self.open[local, micro] = entry, x, term

    def backward(self, k):
        local, micro = self.locate(k, backward=True)
        chunk = self.model.chunks[local]
        entry, x, term = self.open.pop((local, micro))
        if chunk == self.depth - 1:
            term.backward()
        else:
            gradient = self.receive(chunk, micro, backward=True)
            if term.requires_grad and self.grid.mode != "ju73":  # plant: ju73
                torch.autograd.backward([x, term], [gradient, None])  # anchor: both-back
            else:
                x.backward(gradient)
        if chunk > 0:
            self.send(entry.grad, chunk - 1, micro, backward=True)

    def run(self):
        count, pp, each = len(self.batches) * self.each, self.pp, self.each
        ahead = (pp.size - pp.rank - 1) * (2 if each > 1 else 1) + (each - 1) * pp.size
        ahead = min(ahead, count)
        for k in range(count):
            self.forward(k)
            if k >= ahead:
                self.backward(k - ahead)
        for k in range(count - ahead, count):
            self.backward(k)
        for work, _ in self.sends:
            work.wait()
        return add_up(add_up(self.value, pp), self.grid.tokens)


@torch.no_grad()
def clip_stages(model):
    """Clip by the norm over all stages. Only the first one counts the table."""
    grid, zero = model.grid, torch.zeros((), dtype=next(model.parameters()).dtype)
    square, experts = zero, zero.clone()
    for place in list_places(model):
        own = place.tensor.grad.square().sum()
        if place.is_expert:
            experts = experts + own
        elif place.module is not model.table or grid.pp.rank == 0:
            square = square + own
    stages = Comm() if grid.mode == "ju74" else grid.pp  # plant: ju74
    norm = (add_up(square, stages) + add_up(add_up(experts, grid.ep), stages)).sqrt()
    factor = (model.c.max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        parameter.grad.mul_(factor)
    return norm, factor


def pipe_step(model, optimizer, micro_batches, *, scheduler, finish):
    grid = model.grid
    if grid.pp.size == 1:
        value = run_passes(model, micro_batches)
        finish()
        norm, factor = clip(model)
    else:
        value = Passes(model, micro_batches).run()
        finish()
        norm, factor = clip_stages(model)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    move_biases(model, count_positions(micro_batches, grid))
    return {"loss": value, "gradient_norm": norm, "clip_coefficient": factor}
