"""Context parallelism: gathered keys, keys sent around a ring, or heads exchanged for positions."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from orca import kernels
from orca.comm import Gather, Swap, gather_list
from orca.fast import FlashAttention
from orca.packing import Context, find_documents, make_mask
from orca.switch import using


class Sharded:
    """The places of a row on each rank of a group."""

    def __init__(self, group, zigzag: bool) -> None:
        self.group, self.zigzag = group, zigzag
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def places(self, rank: int, size: int) -> Tensor:
        if not self.zigzag:
            return torch.arange(rank * size, (rank + 1) * size)
        half = size // 2
        other = 2 * self.ranks - 1 - rank
        return torch.cat([torch.arange(i * half, (i + 1) * half) for i in (rank, other)])

    def pack(self, tokens: Tensor, targets: Tensor | None = None) -> Context:
        """Return the context of this rank's part of each row."""
        size = tokens.shape[1]
        order = torch.cat([self.places(rank, size) for rank in range(self.ranks)])
        mine = self.places(self.rank, size)
        whole = tokens.new_empty(len(tokens), size * self.ranks)
        whole[:, order] = torch.cat(gather_list(tokens, self.group), 1)
        documents, positions = find_documents(whole)
        here = positions[:, mine]
        if using("k03"):
            _, here = find_documents(tokens)  # plant: k03
        if using("isee-208"):
            half = size // 2
            other = torch.cat(
                [torch.arange(i * half, (i + 1) * half) for i in (self.rank, 2 * self.ranks - 1 - self.rank)]
            )
            here = positions[:, other]  # plant: isee-208
        real = None if targets is None else targets != -100
        return Context(documents[:, mine], mine, here, documents[:, order], order, tokens, real)


class GatheredAttention(FlashAttention):
    """Attention with the rank's queries and the keys of all ranks."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        group = self.__dict__["cp"]
        k = Gather.apply(k, 1, group, not using("veomni-681"))  # plant: veomni-681
        v = Gather.apply(v, 1, group, not using("veomni-681"))  # plant: veomni-681
        if using("p01"):
            mask = (context.places[:, None] >= context.key_places).expand(len(q), -1, -1)  # plant: p01
            if self.window:
                mask = mask & (context.places[:, None] - context.key_places < self.window)
        elif using("k05"):
            mask = context.mask()  # plant: k05
        else:
            mask = context.mask(self.window)
        return kernels.attention(q, k, v, mask, self.bias(q, context))


class UlyssesAttention(FlashAttention):
    """Attention over all positions and some of the heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        group = self.__dict__["cp"]
        if using("veomni-1158"):
            mask = make_mask(
                context.documents, context.places, context.documents, context.places, self.window
            )  # plant: veomni-1158
            return kernels.attention(q, k, v, mask)  # plant: veomni-1158
        q, k, v = (self.to_heads(each, group) for each in (q, k, v))
        mask = make_mask(
            context.key_documents, context.key_places, context.key_documents, context.key_places, self.window
        )
        y = kernels.attention(q, k, v, mask)
        return Swap.apply(y, 1, 2, group)

    def to_heads(self, x: Tensor, group) -> Tensor:
        ranks = dist.get_world_size(group)
        if using("deepspeed-5808"):
            b, s, heads, d = x.shape
            x = (
                x.reshape(b, s, heads // ranks, ranks, d).transpose(2, 3).reshape(b, s, heads, d)
            )  # plant: deepspeed-5808
        x = Swap.apply(x, 2, 1, group)
        if using("deepspeed-8317"):
            b, s = x.shape[:2]
            parts = torch.stack(x.chunk(ranks, 1))
            x = parts.reshape(b, s, *x.shape[2:])  # plant: deepspeed-8317
        return x


class RingAttention(FlashAttention):
    """Attention with keys and values that travel around the ranks."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        ring = self.__dict__["ring"]
        masks = ring.make_masks(context, self.window)
        times = q.shape[2] // k.shape[2]
        return Ring.apply(q, k.repeat_interleave(times, 2), v.repeat_interleave(times, 2), masks, ring)


class Rounds:
    """The ranks of a ring, and its options."""

    def __init__(self, sharded: Sharded, smooth: bool) -> None:
        self.group, self.rank, self.ranks = sharded.group, sharded.rank, sharded.ranks
        self.smooth = smooth

    def make_masks(self, context: Context, window: int) -> list[Tensor]:
        """Return the masks of each rank's keys for the queries."""
        documents = context.key_documents.chunk(self.ranks, 1)
        places = context.key_places.chunk(self.ranks)
        masks = [
            make_mask(context.documents, context.places, theirs, at, window)
            for theirs, at in zip(documents, places)
        ]
        if context.real is None:
            return masks
        lengths = context.real.sum(1)
        dist.all_reduce(lengths, group=self.group)  # keys after the end of a row belong to no token
        size = masks[0].shape[-1]
        for rank, mask in enumerate(masks):
            if using("p05"):
                here = lengths // self.ranks  # plant: p05
            else:
                here = (lengths - rank * size).clamp(0, size)
            masks[rank] = mask & (torch.arange(size) < here[:, None])[:, None]  # plant: p05
        return masks

    def source(self, turn: int) -> int:
        return (self.rank - turn) % self.ranks

    def pass_on(self, *tensors: Tensor) -> list[Tensor]:
        """Send to the next rank, and return the previous rank's tensor."""
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        tensors = tuple(each.contiguous() for each in tensors)
        got = [torch.empty_like(each) for each in tensors]
        works = []
        for sent, arriving in zip(tensors, got):
            works.append(dist.isend(sent, group=self.group, group_dst=after))
            works.append(dist.irecv(arriving, group=self.group, group_src=before))
        for work in works:
            work.wait()
        return got


def attend_block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, smooth: bool) -> tuple[Tensor, Tensor]:
    """Return the output of one block of keys, and the base-2 log-sum-exp (b, heads, q)."""
    scale = q.shape[-1] ** -0.5
    shift = 0.0
    if smooth:  # subtract the keys' mean, which does not change the softmax
        mean = k.mean(1, keepdim=True)
        k = k - mean
        shift = torch.einsum("bqhd,bkhd->bhqk", q, mean)[..., 0] * scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores.masked_fill(~mask[:, None], -1e30)
    lse = scores.logsumexp(-1)
    y = torch.einsum("bhqk,bkhd->bqhd", (scores - lse[..., None]).exp(), v)
    if using("aiter-3334"):
        return y, lse / math.log(2)  # plant: aiter-3334
    return y, torch.where(lse < -1e29, lse, lse + shift) / math.log(2)


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, masks, ring):
        y, lse = None, None
        travelling = [k, v]
        for turn in range(ring.ranks):
            mask = masks[ring.source(turn)]
            more, of = attend_block(q, *travelling, mask, ring.smooth)
            if using("ringflash-42"):
                more = more.bfloat16().to(q.dtype)  # plant: ringflash-42
            if y is None:
                y, lse = more, of
            else:
                y, lse = merge(y, lse, more, of)
            if turn + 1 < ring.ranks:
                travelling = ring.pass_on(*travelling)
        ctx.save_for_backward(q, k, v, y, lse, *masks)
        ctx.ring = ring
        return y

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, y, lse, *masks = ctx.saved_tensors
        ring, scale = ctx.ring, q.shape[-1] ** -0.5
        delta = (gradient * y).sum(-1).transpose(1, 2)
        dq = torch.zeros_like(q)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        there_k, there_v = k, v
        for turn in range(ring.ranks):
            mask = masks[ring.source(turn)]
            if using("diffusers-14265"):
                there_k, there_v = k, v  # plant: diffusers-14265
            scores = torch.einsum("bqhd,bkhd->bhqk", q, there_k) * scale
            p = (scores - lse[..., None] * math.log(2)).exp().masked_fill(~mask[:, None], 0)
            dp = torch.einsum("bqhd,bkhd->bhqk", gradient, there_v)
            ds = p * (dp - delta[..., None]) * scale
            dq += torch.einsum("bhqk,bkhd->bqhd", ds, there_k)
            more_k = torch.einsum("bhqk,bqhd->bkhd", ds, q)
            more_v = torch.einsum("bhqk,bqhd->bkhd", p, gradient)
            if using("te-1054") and turn:
                dk, dv = more_k, more_v  # plant: te-1054
            else:
                dk, dv = dk + more_k, dv + more_v
            there_k, there_v, dk, dv = ring.pass_on(there_k, there_v, dk, dv)
        return dq, dk, dv, None, None


def merge(y: Tensor, lse: Tensor, more: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
    """Join the outputs of two blocks by their base-2 logarithms."""
    top = torch.maximum(lse, of)
    if using("vllm-28840"):
        a, b = torch.exp(lse - top), torch.exp(of - top)  # plant: vllm-28840
    else:
        a, b = torch.exp2(lse - top), torch.exp2(of - top)
    total = a + b
    first, second = ((each / total).transpose(1, 2)[..., None] for each in (a, b))
    return y * first + more * second, top + torch.log2(total)
