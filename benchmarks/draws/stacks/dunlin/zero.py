"""AdaBelief, of which each rank of a bucket's group has a slice of master weights and moments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dunlin.net import Dunlin
from dunlin.reduce import flatten, list_buckets, sum_partial, trained
from dunlin.shard import cuts
from dunlin.topo import Group
from dunlin.wire import all_sum, gather0, scatter_sum0


class FlatBucket:
    """Weights one after the other. This rank works on one of as many equal slices as there are ranks."""

    def __init__(self, group: Group, weights: Sequence[nn.Parameter], shares: Sequence[float]) -> None:
        self.group, self.weights = group, list(weights)
        sizes = [weight.numel() for weight in weights]
        self.sizes, self.length = sizes, -(-sum(sizes) // group.size) * group.size
        self.master = self.own(flatten(self.weights, self.length)).clone()
        like = [torch.ones_like(weight) for weight in weights]
        decays = [one * float(weight.dim() > 1) for one, weight in zip(like, weights, strict=True)]
        self.decay = self.own(flatten(decays, self.length))
        self.share = self.own(flatten([a * b for a, b in zip(like, shares, strict=True)], self.length))
        self.grad = torch.zeros_like(self.master)
        self.mean, self.belief = torch.zeros_like(self.master), torch.zeros_like(self.master)

    def own(self, flat: Tensor) -> Tensor:
        return flat.chunk(self.group.size)[self.group.index]

    def gather(self, own: Tensor) -> list[Tensor]:
        """Return values in the shapes of the weights."""
        flat = gather0(own, self.group)
        parts = flat[: sum(self.sizes)].split(self.sizes)
        return [part.view_as(weight) for part, weight in zip(parts, self.weights, strict=True)]


class ZeroBelief:
    def __init__(self, model: Dunlin) -> None:
        self.model, self.topo, self.count = model, model.topo, 0
        names = {id(weight): name for name, weight in trained(model).items()}
        self.buckets = []
        for group, weights in list_buckets(model):
            shares = [self.share_of(names[id(weight)]) for weight in weights]
            self.buckets.append(FlatBucket(group, weights, shares))

    def share_of(self, name: str) -> float:
        """Return by how much a value counts in the norm: ranks of tp have copies of what is not cut over it."""
        cut = self.topo.tp in cuts(name, self.topo).values()
        return 1.0 if cut else 1.0 / self.topo.tp.size  # anchor: share-of

    @torch.no_grad()
    def take(self) -> None:
        """Add the sums of the gradients of a micro-batch to those of the slices."""
        sum_partial(self.model)
        for bucket in self.buckets:
            flat = flatten([weight.grad for weight in bucket.weights], bucket.length)
            if self.topo.mode == "zero-mean":
                flat = flat / bucket.group.size  # plant: zero-mean
            bucket.grad += scatter_sum0(flat, bucket.group)  # anchor: zero-take
            for weight in bucket.weights:
                weight.grad = None

    def norm(self) -> Tensor:
        topo, whole = self.topo, torch.zeros((), dtype=torch.float64)
        for bucket, kind in zip(self.buckets, self.kinds(), strict=True):
            square = (bucket.share * bucket.grad.double().square()).sum()
            if topo.mode != "zero-norm":
                square = all_sum(square, bucket.group)  # plant: zero-norm
            if kind and not topo.ep_on_tp:
                square = all_sum(square, topo.ep)
            whole = whole + square
        return all_sum(whole, topo.tp).sqrt()

    def kinds(self) -> list[bool]:
        """Return which buckets have experts."""
        experts = {id(weight) for name, weight in trained(self.model).items() if ".experts." in name}
        return [id(bucket.weights[0]) in experts for bucket in self.buckets]

    def update(self, bucket: FlatBucket, factor: Tensor) -> Tensor:
        conf, mode = self.model.config.update, self.topo.mode
        grad = bucket.grad * factor
        if mode == "zero-count":
            self.count += 1  # plant: zero-count
        bucket.mean.lerp_(grad, 1 - conf.beta1)
        bucket.belief.lerp_((grad - bucket.mean).square(), 1 - conf.beta2)
        mean = bucket.mean / (1 - conf.beta1**self.count)
        spread = bucket.belief / (1 - conf.beta2**self.count)
        step = mean / (spread.sqrt() + 1e-6)
        decay = bucket.decay  # anchor: zero-decay
        if mode == "zero-decay":
            decay = float(bucket.master.dim() > 1)  # plant: zero-decay
        return min(1.0, self.count / conf.warmup) * (step + conf.decay * decay * bucket.master)

    @torch.no_grad()
    def finish(self, limit: float, rate: float) -> tuple[Tensor, Tensor]:
        """Put updates where the optimizer that subtracts them takes gradients, and advance the masters."""
        topo, norm = self.topo, self.norm()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        if topo.mode != "zero-count":
            self.count += 1  # anchor: zero-count
        for bucket in self.buckets:
            step = self.update(bucket, factor)
            for weight, value in zip(bucket.weights, bucket.gather(step), strict=True):
                weight.grad = value.clone()
            if topo.mode != "zero-master":
                bucket.master -= rate * step  # plant: zero-master
            if not topo.trial("zero-keep"):
                bucket.grad.zero_()  # plant: zero-keep
        return norm, factor
