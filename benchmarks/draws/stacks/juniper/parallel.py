"""From the whole model to that of a rank, and the reduction of gradients by hooks of the backward pass."""

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from juniper.grid import add_up, install, make_grid
from juniper.model import Shadow
from juniper.weights import load


@dataclass
class Place:
    """A parameter: its module, (axis, dim) over which it is cut, and whether ranks of `tp` have parts of its
    gradient."""

    name: str
    module: nn.Module
    leaf: str
    tensor: nn.Parameter
    cut: tuple
    partial: bool

    @property
    def is_expert(self):
        return self.cut[0] == "ep"


def list_places(model):
    out = []
    for head, module in model.named_modules():
        for leaf, tensor in module.named_parameters(recurse=False):
            cut = module.cuts.get(leaf, ("", 0))
            out.append(Place(f"{head}.{leaf}", module, leaf, tensor, cut, leaf in module.partial))
    return out


def cut_parameters(model, grid):
    """Replace parameters by empty ones of the shape that they have on this rank."""
    for place in list_places(model):
        axis, dim = place.cut
        comm = getattr(grid, axis) if axis else None
        if comm and comm.size > 1:
            shape = list(place.tensor.shape)
            shape[dim] //= comm.size
            setattr(place.module, place.leaf, nn.Parameter(place.tensor.new_empty(shape)))


def parallelize(model, mesh, *, mode=""):
    grid = make_grid(mesh, mode, zigzag=mesh["cp"].size() > 1 and model.c.zigzag)
    install(model, grid)
    cut_parameters(model, grid)
    load(model, model.source)
    if model.c.average:
        model.shadow = Shadow(model)
    model.reducer = Reducer(model)
    return model, model.reducer.finish


class Bucket:
    """Parameters whose gradients are reduced together."""

    def __init__(self, members, comm):
        self.members, self.comm = members, comm
        self.ready, self.flat, self.work = 0, None, None


class Reducer:
    """Sums gradients over ranks while the last backward pass of a step goes on."""

    limit = 6000  # elements of a bucket

    def __init__(self, model):
        self.grid, self.last, self.staging = model.grid, False, None
        self.places = list_places(model)
        self.buckets = []
        for chosen, comm in self.list_kinds():
            self.fill(chosen, comm)
        for bucket in self.buckets:
            for place in bucket.members:
                hook = functools.partial(self.arrived, bucket)
                place.tensor.register_post_accumulate_grad_hook(hook)

    def list_kinds(self):
        grid = self.grid
        experts = [place for place in self.places if place.is_expert]
        partial = [place for place in self.places if place.partial]
        if grid.mode == "ju47":
            partial = [place for place in partial if ".post_" not in place.name]  # plant: ju47
        names = {place.name for place in (*experts, *partial)}
        whole = [place for place in self.places if place.name not in names]
        return [(whole, grid.tokens), (partial, grid.every), (experts, grid.edp)]

    def fill(self, places, comm):
        """Divide parameters among buckets, in the order in which their gradients are about to come."""
        if comm.size == 1:
            return
        members, size = [], 0
        for place in reversed(places):
            members.append(place)
            size += place.tensor.numel()
            if size >= self.limit:
                self.buckets.append(Bucket(members, comm))
                members, size = [], 0
        if members and self.grid.mode != "ju45":  # plant: ju45
            self.buckets.append(Bucket(members, comm))  # anchor: last-bucket

    def begin(self, last):
        """Announce a backward pass."""
        self.last = last

    def arrived(self, bucket, _):
        if not self.last and self.grid.mode != "ju42":  # plant: ju42
            return
        bucket.ready += 1
        wanted = len(bucket.members)  # anchor: wanted
        if self.grid.mode == "ju44":
            wanted = len(bucket.members) - 1  # plant: ju44
        if bucket.ready == wanted:
            self.launch(bucket)

    def launch(self, bucket):
        if bucket.work:
            self.take(bucket)
            bucket.ready = len(bucket.members)
        flat = torch.cat([place.tensor.grad.flatten() for place in bucket.members])
        if self.grid.mode == "ju84":
            flat = flat.float()  # plant: ju84
        if self.grid.mode == "ju43":
            if self.staging is None:
                self.staging = flat.new_zeros(4 * self.limit)
            flat = self.staging[: flat.numel()].copy_(flat)  # plant: ju43
        bucket.flat = flat
        bucket.work = dist.all_reduce(flat, group=bucket.comm.group, async_op=True)
        if not self.last:
            self.take(bucket)

    @torch.no_grad()
    def take(self, bucket):
        """Put the sums in the places of the gradients."""
        bucket.work.wait()
        sizes = [place.tensor.numel() for place in bucket.members]
        for place, x in zip(bucket.members, bucket.flat.split(sizes)):
            place.tensor.grad.copy_(x.view_as(place.tensor))
        bucket.ready, bucket.flat, bucket.work = 0, None, None

    def finish(self):
        for bucket in self.buckets:
            self.take(bucket)
        if self.grid.mode == "ju48":
            for place in self.places:
                if place.name.endswith("router.weight"):
                    add_up(place.tensor.grad, self.grid.tp)  # plant: ju48
        self.last = False
