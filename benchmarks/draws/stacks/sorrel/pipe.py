"""A pipeline by hand: after some forward passes, one forward and one backward pass in turn."""

import torch
import torch.distributed as dist
from torch import nn

from sorrel.grid import Grid, install
from sorrel.moe import Router
from sorrel.segments import read_segments


class Layers(nn.ModuleList):
    """Layers of a stage, under their numbers in the whole model."""

    def __init__(self, layers, numbers):
        super().__init__()
        for number in numbers:
            self.add_module(str(number), layers[number])

    def __iter__(self):
        return iter(self._modules.values())

    def __len__(self):
        return len(self._modules)


def stages(model, mesh, *, variant=""):
    """The ranks of `tp` are stages. The first and the last one have the table."""
    axis = mesh["tp"]
    stage, count, depth = axis.get_local_rank(), axis.size(), len(model.layers)
    install(model, Grid(variant=variant, stages=axis.get_group()))
    per_stage = -(-depth // count)
    start = stage * per_stage  # anchor: stage-start
    if model.grid.has("sorrel-stage-start"):
        start = stage * (depth // count)  # plant: sorrel-stage-start
    stop = min(depth, (stage + 1) * per_stage)
    model.layers = Layers(model.layers, range(start, stop))
    if stage > 0 and stage < count - 1:
        model.table = None
    if stage < count - 1:
        model.norm = model.ahead = None

    def finish():
        if model.table is None:
            return
        gradient, group = model.table.weight.grad, model.grid.stages
        dist.all_reduce(gradient, group=group)
        if model.grid.has("sorrel-table-mean"):
            gradient /= group.size()  # plant: sorrel-table-mean

    return model, finish


class Schedule:
    """The passes of one stage in one step."""

    def __init__(self, model, micro_batches, num_valid):
        self.model, self.batches, self.num_valid = model, micro_batches, num_valid
        self.group = model.grid.stages
        self.stage, self.count = self.group.rank(), self.group.size()
        self.first, self.last = self.stage == 0, self.stage == self.count - 1
        self.waiting, self.sends, self.loss = [], [], torch.zeros(())

    def receive(self, source, index):
        config, tokens = self.model.config, self.batches[index][0]
        dtype = next(self.model.parameters()).dtype
        x = torch.empty(*tokens.shape, config.width, dtype=dtype)
        dist.recv(x, group=self.group, group_src=source)
        return x

    def send(self, x, target):
        x = x.detach().contiguous()
        self.sends.append((dist.isend(x, group=self.group, group_dst=target), x))

    def forward(self, index):
        model, (tokens, targets) = self.model, self.batches[index]
        segments = read_segments(tokens, model.config, model.grid)
        if self.first:
            inputs, x = None, model.table(tokens)
        else:
            inputs = self.receive(self.stage - 1, index).requires_grad_()
            x = inputs
        x, z, balance = model.trunk(x, segments)
        terms = model.router_terms(z, balance)
        if self.last:
            if model.grid.has("sorrel-stage-targets"):
                targets = self.batches[0][1]  # plant: sorrel-stage-targets
            terms |= model.ends(x, tokens, targets, segments)
        else:
            self.send(x, self.stage + 1)
        value = sum(terms.values()) / self.num_valid
        self.loss = self.loss + (value.detach() if torch.is_tensor(value) else value)
        self.waiting.append((inputs, x, value))

    def backward(self, index):
        inputs, x, value = self.waiting.pop(0)
        if self.last:
            value.backward()
        else:
            grad = self.receive(self.stage + 1, index)
            if torch.is_tensor(value) and value.requires_grad:
                scale = torch.ones_like(value)  # anchor: stage-scale
                if self.model.grid.has("sorrel-stage-scale"):
                    scale = scale / len(self.batches)  # plant: sorrel-stage-scale
                torch.autograd.backward([x, value], [grad, scale])
            else:
                x.backward(grad)
        if inputs is not None:
            self.send(inputs.grad, self.stage - 1)

    def run(self):
        ahead = min(self.count - 1 - self.stage, len(self.batches))
        for index in range(ahead):
            self.forward(index)
        for index in range(len(self.batches) - ahead):
            self.forward(index + ahead)
            self.backward(index)
        for index in range(len(self.batches) - ahead, len(self.batches)):
            self.backward(index)
        for work, _ in self.sends:
            work.wait()
        return self.loss


def run_whole(model, micro_batches, num_valid):
    loss = torch.zeros(())
    for tokens, targets in micro_batches:
        value = sum(model(tokens, targets).values()) / num_valid
        value.backward()
        loss = loss + value.detach()
    return loss


def pipe_step(model, optimizer, micro_batches, *, num_valid, finish):
    group = model.grid.stages
    if group is None:
        loss = run_whole(model, micro_batches, num_valid)
    else:
        loss = Schedule(model, micro_batches, num_valid).run()
        dist.all_reduce(loss, group=group)
    finish()
    optimizer.step()
    optimizer.zero_grad()
    for module in model.modules():
        if isinstance(module, Router):
            module.update_bias()
    return {"loss": loss}
