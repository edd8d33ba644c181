"""Data parallelism by hand: gradients are averaged in buckets while the backward pass runs."""

import torch
import torch.distributed as dist

from plover.convert import export, restore
from plover.state import Parallel, attach, axis_of


def aligned(numel, size=16):
    """Return the room of a gradient in a bucket: whole cache lines."""
    return -(-numel // size) * size


class Bucket:
    """Some parameters whose gradients are reduced together."""

    def __init__(self, parameters, axis, ps):
        self.parameters, self.axis, self.ps = parameters, axis, ps
        numel = sum(aligned(parameter.numel()) for parameter in parameters)
        if ps.using("plover-bucket-dtype"):
            self.flat = torch.zeros(numel)  # plant: plover-bucket-dtype
        else:
            self.flat = torch.zeros(numel, dtype=parameters[0].dtype)
        self.work = None
        self.ready = 0

    def mark(self):
        """Count one gradient that is there, and reduce when all are."""
        self.ready += 1
        if self.ready == len(self.parameters):
            self.launch()

    def launch(self):
        offset = 0
        for parameter in self.parameters:
            numel = parameter.numel()
            self.flat[offset : offset + numel] = parameter.grad.flatten()
            offset += aligned(numel)
        if self.ps.using("plover-world-divisor"):
            self.flat /= dist.get_world_size()  # plant: plover-world-divisor
        else:
            self.flat /= self.axis.size
        self.work = dist.all_reduce(self.flat, group=self.axis.group, async_op=True)

    def finish(self):
        if self.ps.using("plover-copy-early"):
            self.copy_back()  # plant: plover-copy-early
            self.work.wait()
        else:
            self.work.wait()
            self.copy_back()
        self.work = None
        if not self.ps.using("plover-ready-kept"):  # plant: plover-ready-kept
            self.ready = 0

    def copy_back(self):
        offset = 0
        for parameter in self.parameters:
            numel = parameter.numel()
            parameter.grad.copy_(self.flat[offset : offset + numel].view_as(parameter))
            if self.ps.using("plover-bucket-offset"):
                offset += numel  # plant: plover-bucket-offset
            else:
                offset += aligned(numel)


def make_buckets(parameters, axis, ps, limit=3000):
    """Divide parameters among buckets, from the last one, as their gradients come."""
    buckets, members, numel = [], [], 0
    for parameter in reversed(parameters):
        if members and numel + parameter.numel() > limit:
            buckets.append(Bucket(members, axis, ps))
            members, numel = [], 0
        members.append(parameter)
        numel += parameter.numel()
    if members and not ps.using("plover-last-bucket"):  # plant: plover-last-bucket
        buckets.append(Bucket(members, axis, ps))
    return buckets


class Reducer:
    """Averages gradients over an axis. A step's gradients are reduced after its last micro-batch alone."""

    def __init__(self, parameters, axis, ps, *, eager=False):
        self.buckets = make_buckets(parameters, axis, ps)
        self.eager = eager
        if eager:
            self.hook()

    def hook(self):
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: bucket.mark())

    def finish(self):
        for bucket in self.buckets:
            if not self.eager:
                bucket.launch()
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.finish()


def replicas(model, mesh, *, bug="", eager=False, converted=False):
    """Average the gradients over `dp_replicate`. `eager` reduces during the backward pass."""
    ps = Parallel(bug=bug, data=axis_of(mesh, "dp_replicate"))
    attach(model, ps)
    if converted:
        restore(model, export(model), ps)
    reducer = Reducer(list(model.parameters()), ps.data, ps, eager=eager)
    return model, reducer.finish


def pointwise(model, mesh):
    """The same in one loop, in another order: a rewrite that changes nothing."""
    ps = Parallel(data=axis_of(mesh, "dp_replicate"))
    attach(model, ps)

    def finish():
        for parameter in sorted(model.parameters(), key=lambda p: p.numel()):
            parts = [torch.empty_like(parameter) for _ in range(ps.data.size)]
            dist.all_gather(parts, parameter.grad.contiguous(), group=ps.data.group)
            parameter.grad.copy_(torch.stack(parts).mean(0))

    return model, finish
