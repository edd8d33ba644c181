"""ZeRO: a rank keeps the moments and master weights of its part of every bucket."""

import torch
from torch.nn import functional as F

from wren.model import cuts_of
from wren.parallel import add_slices, pools_of
from wren.world import own_part, raw_gather, raw_scatter, raw_sum


def rate_factor(seen, c):
    """Return the factor of the rate after a number of tokens: up, and then down to a tenth."""
    up = min(1.0, seen / c.warm_tokens)
    return up * (1 - 0.9 * min(1.0, seen / c.total_tokens))


class Shard:
    """This rank's part of the buckets of a pool."""

    def __init__(self, pool, w):
        self.pool, self.team, self.w = pool, pool.team, w
        self.master = self.own([p.detach() for _, p in pool.named])
        self.m, self.v = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.gradient = torch.zeros_like(self.master)
        decayed = [torch.full_like(p, float(p.dim() > 1 and "gain" not in n)) for n, p in pool.named]
        self.decayed = self.own(decayed)  # anchor: decayed
        if w.has("wren-decay-first"):
            self.decayed = self.pad(decayed)[: len(self.master)]  # plant: wren-decay-first
        # What several ranks of `tp` have counts once in the norm.
        counts = [torch.full_like(p, float(w.tp.rank == 0 or "tp" in cuts_of(n))) for n, p in pool.named]
        self.counts = self.own(counts)

    def pad(self, tensors):
        flat = torch.cat([x.detach().flatten() for x in tensors])
        return F.pad(flat, (0, len(self.pool.flat) - len(flat)))

    def own(self, tensors):
        flat, edges = self.pad(tensors), self.pool.edges
        return torch.cat([own_part(flat[a:b], self.team) for a, b in zip(edges, edges[1:])])

    def take(self):
        """Take this rank's part of the summed gradients."""
        parts = [raw_scatter(bucket, self.team) for bucket in self.pool.buckets()]
        self.gradient = torch.cat(parts)  # anchor: take
        if self.w.has("wren-take-mean"):
            self.gradient = torch.cat(parts) / self.team.size  # plant: wren-take-mean

    def square(self):
        value = (self.gradient.square() * self.counts).sum()
        if self.w.has("wren-zero-norm"):
            return raw_sum(value, self.w.dp)  # plant: wren-zero-norm
        return raw_sum(value, self.team)  # anchor: shard-norm

    def hand_out(self, direction):
        """Give all ranks the whole direction, in the places of the gradients."""
        parts = direction.split([len(bucket) // self.team.size for bucket in self.pool.buckets()])
        for bucket, part in zip(self.pool.buckets(), parts):
            whole = raw_gather(part, self.team)  # anchor: hand-out
            if self.w.has("wren-own-first"):
                whole = whole.roll(-self.team.rank * len(part))  # plant: wren-own-first
            bucket.copy_(whole)


class Zero:
    """AdamW on shards. Directions go to an optimizer that subtracts them times the rate."""

    def __init__(self, model):
        self.model, self.c, self.w = model, model.c, model.world
        self.pools = pools_of(model)
        self.shards = [Shard(pool, self.w) for pool in self.pools]
        self.steps, self.seen = 0, 0.0

    def attach(self):
        for pool in self.pools:
            pool.attach()

    @torch.no_grad()
    def update(self, rate, tokens):
        """Put directions in the places of gradients. Returns the norm and the factor of the clip.

        `tokens` is the number of tokens that this rank has read in the step.
        """
        c, w = self.c, self.w
        add_slices(self.model)
        squares = []
        for shard in self.shards:
            shard.take()
            squares.append(raw_sum(shard.square(), w.tp))
        squares[1] = raw_sum(squares[1], w.ep)
        norm = sum(squares).sqrt()
        clip = (c.max_norm / (norm + 1e-6)).clamp(max=1.0)
        self.steps += 1
        if w.has("wren-seen-own"):
            self.seen += float(tokens)  # plant: wren-seen-own
        else:
            self.seen += float(raw_sum(tokens, w.tok))  # anchor: seen
        factor = rate_factor(self.seen, c)
        for shard in self.shards:
            direction = factor * (self.adam(shard, clip) + c.decay * shard.decayed * shard.master)
            shard.master.sub_(rate * direction)
            shard.hand_out(direction)
        return norm, clip

    def adam(self, shard, clip):
        (b1, b2), gradient = self.c.betas, shard.gradient * clip
        shard.m.mul_(b1).add_(gradient, alpha=1 - b1)
        shard.v.mul_(b2).add_(gradient.square(), alpha=1 - b2)
        m, v = shard.m / (1 - b1**self.steps), shard.v / (1 - b2**self.steps)
        return m / (v.sqrt() + self.c.eps)

    def state(self):
        shards = [{key: getattr(shard, key).clone() for key in ("master", "m", "v")} for shard in self.shards]
        return {"shards": shards, "steps": self.steps, "seen": self.seen}

    def load(self, files):
        """Go on from the files of all ranks of `tok`, which are in the order of ranks."""
        w = self.w
        for i, shard in enumerate(self.shards):
            file = files[w.tok.rank]  # anchor: own-shard
            if w.has("wren-load-shard"):
                file = files[shard.team.rank]  # plant: wren-load-shard
            for key, value in file["zero"]["shards"][i].items():
                getattr(shard, key).copy_(value)
        self.steps, self.seen = files[0]["zero"]["steps"], files[0]["zero"]["seen"]
