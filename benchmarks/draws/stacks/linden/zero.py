"""ZeRO stage 2: a rank keeps gradients, moments and master weights of its part of two flat buckets."""

import torch
import torch.distributed as dist

from linden.rules import decays, factor_of
from linden.shard import PARTIAL, cuts_of, is_expert, leaf_of
from linden.topo import all_sum


class Bucket:
    """Parameters whose gradients are summed over one axis, cut in equal parts over it."""

    def __init__(self, named, axis, topo):
        self.named, self.axis, self.topo = named, axis, topo
        self.numel = sum(p.numel() for _, p in named)
        self.part = -(-self.numel // axis.size)
        start = axis.rank * self.part  # anchor: part-start
        if topo.on("linden-part-start"):
            start = topo.rows.rank * self.part  # plant: linden-part-start
        self.own = slice(start, start + self.part)
        self.master = self.mine([p.detach() for _, p in named])
        self.gradient = torch.zeros_like(self.master)
        self.m, self.v = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.decayed = self.mine([torch.full_like(p, float(decays(n, topo))) for n, p in named])
        # A value that several ranks of `tp` have counts on the first one.
        self.counted = self.mine([torch.full_like(p, float(self.counts(n))) for n, p in named])

    def counts(self, name):
        topo = self.topo
        return topo.tp.rank == 0 or any(axis is topo.tp for axis, _ in cuts_of(name, topo))

    def pack(self, tensors):
        flat = torch.cat([x.flatten() for x in tensors])
        return torch.cat([flat, flat.new_zeros(self.part * self.axis.size - self.numel)])

    def mine(self, tensors):
        return self.pack(tensors)[self.own].clone()

    def collect(self):
        """Add the gradients of a backward pass to this rank's part, and drop them."""
        flat = self.pack([p.grad for _, p in self.named])
        part = flat
        if self.axis.size > 1:
            part = flat.new_empty(self.part)
            dist.reduce_scatter_tensor(part, flat, group=self.axis.pg)
        if self.topo.on("linden-collect-set"):
            self.gradient.copy_(part)  # plant: linden-collect-set
        else:
            self.gradient.add_(part)  # anchor: collect
        if self.topo.on("linden-collect-kept"):
            return  # plant: linden-collect-kept
        for _, parameter in self.named:
            parameter.grad = None

    def hand_out(self, part):
        """Put what all ranks have computed in the places of the gradients."""
        whole = part
        if self.axis.size > 1:
            whole = part.new_empty(self.part * self.axis.size)
            dist.all_gather_into_tensor(whole, part, group=self.axis.pg)
        first = 0
        for _, parameter in self.named:
            parameter.grad = whole[first : first + parameter.numel()].view_as(parameter).clone()
            first += parameter.numel()


class ZeroAdam:
    """AdamW by hand. What it computes goes to an optimizer that subtracts it times the rate."""

    def __init__(self, net):
        self.sizes, self.topo, self.step = net.sizes, net.topo, 0
        named = list(net.named_parameters())
        self.buckets = [
            Bucket([(n, p) for n, p in named if not is_expert(n)], net.topo.data, net.topo),
            Bucket([(n, p) for n, p in named if is_expert(n)], net.topo.copies, net.topo),
        ]

    @torch.no_grad()
    def collect(self):
        for bucket in self.buckets:
            for name, parameter in bucket.named:
                if leaf_of(name) in PARTIAL:
                    all_sum(parameter.grad, self.topo.tp)
            bucket.collect()

    def norm(self):
        topo = self.topo
        dense, expert = [(b.gradient.square() * b.counted).sum() for b in self.buckets]
        whole = all_sum(dense, topo.data, topo.tp) + all_sum(expert, topo.copies, topo.ep, topo.tp)
        return whole.sqrt()

    @torch.no_grad()
    def update(self, rate):
        """Compute directions from the collected gradients. Returns the norm and the factor of the clip."""
        sizes, topo = self.sizes, self.topo
        norm = self.norm()
        clip = (sizes.max_norm / (norm + 1e-6)).clamp(max=1.0)
        factor = factor_of(self.step, sizes)  # anchor: factor
        self.step += 1
        if topo.on("linden-factor-next"):
            factor = factor_of(self.step, sizes)  # plant: linden-factor-next
        for bucket in self.buckets:
            direction = self.direction(bucket, clip) + sizes.decay * bucket.decayed * bucket.master
            direction = factor * direction
            bucket.master.sub_(rate * direction)
            bucket.hand_out(direction)
            bucket.gradient.zero_()
        return norm, clip

    def direction(self, bucket, clip):
        (b1, b2), topo, t = self.sizes.betas, self.topo, self.step
        g = bucket.gradient * clip
        square = g.square()  # anchor: square
        if topo.on("linden-square-raw"):
            square = bucket.gradient.square()  # plant: linden-square-raw
        if topo.on("linden-betas"):
            b1, b2 = b2, b1  # plant: linden-betas
        bucket.m.mul_(b1).add_(g, alpha=1 - b1)
        bucket.v.mul_(b2).add_(square, alpha=1 - b2)
        if topo.on("linden-correction"):
            t = t + 1  # plant: linden-correction
        m, v = bucket.m / (1 - b1**t), bucket.v / (1 - b2**t)
        if topo.on("linden-eps-root"):
            return m / (v + self.sizes.eps).sqrt()  # plant: linden-eps-root
        return m / (v.sqrt() + self.sizes.eps)  # anchor: eps

    def saved(self):
        state = {"step": self.step}
        for i, b in enumerate(self.buckets):
            state[f"bucket{i}"] = {"master": b.master.clone(), "m": b.m.clone(), "v": b.v.clone()}
        return state

    @torch.no_grad()
    def load(self, state):
        self.step = state["step"]
        keys = ("master", "m", "v")  # anchor: keys
        if self.topo.on("linden-load-master"):
            keys = ("m", "v")  # plant: linden-load-master
        if self.topo.on("linden-load-squares"):
            keys = ("master", "m")  # plant: linden-load-squares
        for i, bucket in enumerate(self.buckets):
            for key in keys:
                getattr(bucket, key).copy_(state[f"bucket{i}"][key])
