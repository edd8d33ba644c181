"""Handwritten data parallelism: overlapped buckets, wide accumulators, and partitioned parameters."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor


class Bucket:
    def __init__(self, size, like):
        self.data = torch.zeros(size, dtype=like.dtype)
        self.ready = None


class Overlapped:
    """Flat buckets for gradients of the last micro-batch, reduced during the backward pass."""

    def __init__(self, model, group, size, mode):
        self.group, self.ranks, self.mode, self.size = group, dist.get_world_size(group), mode, size
        weights = [w for w in model.parameters()]
        self.buckets = [Bucket(size, weights[0]), Bucket(size, weights[0])]
        self.index, self.fill, self.members, self.futures = 0, 0, [], []
        self.last = True
        for weight in weights:
            weight.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, weight):
        if not self.last:
            return
        count = weight.numel()
        if self.fill + count > self.size:
            self.reduce_bucket()
        self.buckets[self.index].data[self.fill : self.fill + count].copy_(weight.grad.flatten())
        self.members.append((weight, self.fill, count))
        self.fill += count

    def reduce_bucket(self):
        if not self.members:
            return
        bucket, members = self.buckets[self.index], self.members
        work = dist.all_reduce(bucket.data[: self.fill], group=self.group, async_op=True)
        bucket.ready = work.get_future().then(lambda _: self.copy_back(bucket, members))
        self.futures.append(bucket.ready)
        self.index ^= 1
        if self.buckets[self.index].ready is not None:
            self.buckets[self.index].ready.wait()
        self.clear()

    def clear(self):
        self.fill, self.members = 0, []
        if self.mode == "p32":
            self.index = 0  # plant: p32

    def copy_back(self, bucket, members):
        for weight, start, count in members:
            weight.grad.copy_(bucket.data[start : start + count].view_as(weight.grad) / self.ranks)

    def finish(self):
        self.reduce_bucket()
        for future in self.futures:
            future.wait()
        self.futures = []

    @contextlib.contextmanager
    def accumulate(self, last):
        self.last = last
        yield


class Pooled(Overlapped):
    """Buckets from a pool, zeroed."""

    def __init__(self, model, group, size, mode):
        super().__init__(model, group, size, mode)
        self.like = self.buckets[0].data
        self.free = []
        self.buckets = [self.take()]
        self.index = 0

    def take(self):
        if self.free:
            bucket = self.free.pop()
            bucket.data.zero_()
            return bucket
        return Bucket(self.size, self.like)

    def reduce_bucket(self):
        if not self.members:
            return
        bucket, members = self.buckets[0], self.members
        work = dist.all_reduce(bucket.data[: self.fill], group=self.group, async_op=True)
        if self.mode == "p33":
            self.free.append(bucket)  # plant: p33
            self.futures.append(work.get_future().then(lambda _: self.copy_back(bucket, members)))
        else:
            self.futures.append(work.get_future().then(lambda _: self.give_back(bucket, members)))
        self.fill, self.members = 0, []
        self.buckets = [self.take()]

    def give_back(self, bucket, members):
        self.copy_back(bucket, members)
        self.free.append(bucket)


def bucketed(model, mesh, mode="", pooled=False, size=6000):
    from moeverify.train.parallelize_custom import ParallelizedCustomModel

    reducer = (Pooled if pooled else Overlapped)(model, mesh["dp_shard"].get_group(), size, mode)
    return ParallelizedCustomModel(model, finalize=reducer.finish, accumulate=reducer.accumulate)


class Accumulators:
    """A wide buffer that sums gradients of micro-batches and is reduced once."""

    def __init__(self, model, group, mode):
        self.model, self.group, self.mode = model, group, mode
        self.main = {}
        self.last = True

    @contextlib.contextmanager
    def accumulate(self, last):
        yield
        if not last:
            for weight in self.model.parameters():
                self.add(weight)

    def add(self, weight):
        wide = torch.float32 if weight.dtype == torch.bfloat16 else weight.dtype
        if weight.grad is not None:
            if weight not in self.main:
                self.main[weight] = torch.zeros_like(weight, dtype=wide)
            self.main[weight] += weight.grad
            weight.grad = None

    def finish(self):
        ranks = dist.get_world_size(self.group)
        weights = list(self.model.parameters())
        if self.mode == "p37":
            for weight in weights:
                dist.all_reduce(self.main[weight], group=self.group)  # plant: p37
                self.add(weight)  # plant: p37
        else:
            for weight in weights:
                self.add(weight)
                dist.all_reduce(self.main[weight], group=self.group)
        for weight in weights:
            weight.grad = (self.main.pop(weight) / ranks).to(weight.dtype)


def accumulated(model, mesh, mode=""):
    from moeverify.train.parallelize_custom import ParallelizedCustomModel

    made = Accumulators(model, mesh["dp_shard"].get_group(), mode)
    return ParallelizedCustomModel(model, finalize=made.finish, accumulate=made.accumulate)


class Partition:
    """Weights of some modules as flat parts, one per rank, that a forward pass gathers together."""

    def __init__(self, modules, group, mode, stage):
        self.group, self.mode = group, mode
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.stage = stage
        self.entries = []
        for module in modules:
            for name, weight in list(module.named_parameters(recurse=False)):
                part = -(-weight.numel() // self.ranks)
                flat = weight.detach().flatten()
                mine = flat[self.rank * part : (self.rank + 1) * part].clone()
                del module._parameters[name]
                shard = nn.Parameter(mine)
                module.register_parameter(name + "_shard", shard)
                self.entries.append((module, name, shard, weight.shape, part))
        self.second, self.dirty = None, True

    def keep_second(self):
        self.second = [shard.detach().clone() for _, _, shard, _, _ in self.entries]
        self.dirty = False

    def fetch(self, *_):
        shards = [shard for _, _, shard, _, _ in self.entries]
        for (module, name, *_), whole in zip(self.entries, _Fetch.apply(self, *shards)):
            setattr(module, name, whole)

    def gather(self, shards):
        if self.second is not None:
            if self.dirty:
                self.second = [shard.detach().clone() for shard in shards]
                self.dirty = False
            shards = self.second
        flat = shards[0].new_zeros(sum(part * self.ranks for *_, part in self.entries))
        start = 0
        for shard, (_, _, _, shape, part) in zip(shards, self.entries):
            staged = self.stage[:part]
            staged[: len(shard)] = shard.detach()
            flat[start + self.rank * part : start + (self.rank + 1) * part] = staged
            start += self.stride(shape, part)
        dist.all_reduce(flat, group=self.group)
        whole, start = [], 0
        for _, _, _, shape, part in self.entries:
            whole.append(flat[start : start + shape.numel()].view(shape).clone())
            start += self.stride(shape, part)
        return tuple(whole)

    def stride(self, shape, part):
        if self.mode == "p35":
            return shape.numel()  # plant: p35
        return part * self.ranks


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, owner, *shards):
        ctx.owner = owner
        return owner.gather(shards)

    @staticmethod
    def backward(ctx, *gradients):
        owner, mine = ctx.owner, []
        for gradient, (_, _, shard, _, part) in zip(gradients, owner.entries):
            flat = gradient.flatten().clone()
            dist.all_reduce(flat, group=owner.group)
            mine.append(flat[owner.rank * part : owner.rank * part + len(shard)] / owner.ranks)
        return None, *mine


def partitioned(model, mesh, mode="", second=False):
    """Partition every block's weights over `dp_shard`; with `second` a copy of the parts is gathered."""
    group = mesh["dp_shard"].get_group()
    trained = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    stage = torch.zeros(max(w.numel() for w in trained.values()), dtype=next(iter(trained.values())).dtype)
    if second:  # the model is made with separate weights, and gets the trained ones below
        generator = torch.Generator().manual_seed(99)
        for weight in model.parameters():
            weight.data.copy_(torch.randn(weight.shape, generator=generator) / 8)
    units = [list(block.modules()) for block in model.layers] + [[model.embed, model.norm, model.head]]
    parts = [Partition(unit, group, mode, stage) for unit in units]
    for block, part in zip(model.layers, parts):
        block.register_forward_pre_hook(part.fetch)
    model.register_forward_pre_hook(parts[-1].fetch)
    if second:
        for part in parts:
            part.keep_second()
        load(model, trained, parts, mode)

    def finish():
        for part in parts:
            part.dirty = True

    return model, finish


def load(model, trained, parts, mode):
    names = {id(module): name for name, module in model.named_modules()}
    for part in parts:
        for module, name, shard, _, size in part.entries:
            flat = trained[f"{names[id(module)]}.{name}"].flatten()
            shard.data.copy_(flat[part.rank * size : part.rank * size + len(shard)])
        if mode != "p36":  # plant: p36
            part.dirty = True  # plant: p36


class _GridGather(torch.autograd.Function):
    """The full tensor of a dim 0 that is sharded over two axes, one within the other."""

    @staticmethod
    def forward(ctx, local, mesh, rows, fused):
        ctx.mesh, ctx.mine = mesh, len(local)
        outer, inner = mesh["dp_shard"], mesh["tp"]
        if fused:
            size = outer.size() * inner.size()
            chunk = -(-rows // size)
            return gather_rows(local, chunk, [chunk] * size, None)[:rows]  # plant: p42
        sizes = chunks(rows, outer.size())
        mine = sizes[outer.get_local_rank()]
        inner_sizes = chunks(mine, inner.size())
        ctx.start = sum(sizes[: outer.get_local_rank()]) + sum(inner_sizes[: inner.get_local_rank()])
        part = gather_rows(local, inner_sizes[0], inner_sizes, inner.get_group())
        return gather_rows(part, sizes[0], sizes, outer.get_group())

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        outer, inner = ctx.mesh["dp_shard"], ctx.mesh["tp"]
        dist.all_reduce(gradient, group=outer.get_group())
        sizes = chunks(len(gradient), outer.size())
        inner_sizes = chunks(sizes[outer.get_local_rank()], inner.size())
        start = sum(sizes[: outer.get_local_rank()]) + sum(inner_sizes[: inner.get_local_rank()])
        return gradient[start : start + ctx.mine] / outer.size(), None, None, None


def chunks(rows, size):
    chunk = -(-rows // size)
    return [max(0, min(chunk, rows - i * chunk)) for i in range(size)]


def gather_rows(local, chunk, sizes, group):
    padded = local.new_zeros(chunk, *local.shape[1:])
    padded[: len(local)] = local
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes)])


def grid(model, mesh, mode=""):
    """Shard rows of every weight over `dp_shard`, and each part over `tp`."""
    both = mesh["dp_shard", "tp"]
    for module in list(model.modules()):
        for name, weight in list(module.named_parameters(recurse=False)):
            divided = nn.Parameter(distribute_tensor(weight.detach(), both, [Shard(0), Shard(0)]))
            module.register_parameter(name, divided)
            fill = _Fill(name, divided, both, mode == "p42")
            module.register_forward_pre_hook(fill)
            module.register_forward_hook(fill.restore)
    return model


class _Fill:
    def __init__(self, name, weight, mesh, fused):
        self.name, self.weight, self.mesh, self.fused = name, weight, mesh, fused

    def __call__(self, module, _):
        whole = _GridGather.apply(self.weight.to_local(), self.mesh, self.weight.shape[0], self.fused)
        module._parameters.pop(self.name)
        setattr(module, self.name, whole)

    def restore(self, module, *_):
        delattr(module, self.name)
        module.register_parameter(self.name, self.weight)
