"""Ring attention: keys and values go around the ranks of `cp`, and softmax is put together online."""

import torch
import torch.distributed as dist
from torch.autograd import Function

from hazel.packing import visible


def shift(tensors, pc):
    """Send tensors to the next rank of `cp`, and return those of the rank before."""
    group, ranks, rank = pc.group("cp"), pc.size("cp"), pc.rank("cp")
    after = dist.get_global_rank(group, (rank + 1) % ranks)
    before = dist.get_global_rank(group, (rank - 1) % ranks)
    got, ops = [x.new_empty(x.shape) for x in tensors], []
    for x, out in zip(tensors, got):
        ops.append(dist.P2POp(dist.isend, x.contiguous(), after, group))
        ops.append(dist.P2POp(dist.irecv, out, before, group))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got


def hops(packed, window, pc):
    """Return how many rounds a window needs, the own block not counted."""
    ranks, length = pc.size("cp"), len(packed.place)
    if pc.on("hazel-same-rounds"):
        return ranks - 1
    if pc.on("hazel-ring-hops"):
        return min(ranks - 1, window // length)  # plant: hazel-ring-hops
    return min(ranks - 1, -(-(window - 1) // length))  # anchor: hops


def block_scores(q, k, mask, scale):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q @ k.mT * scale).masked_fill(~mask[:, None], -torch.inf)


def over_groups(x, heads, pc):
    """Add gradients of the query heads that share a key head."""
    groups = x.shape[1] // heads
    if pc.on("hazel-ring-groups"):
        return x.unflatten(1, (groups, heads)).sum(1)  # plant: hazel-ring-groups
    return x.unflatten(1, (heads, groups)).sum(2)  # anchor: groups


class RingAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, packed, window, scale, pc):
        rounds = hops(packed, window, pc)
        key_place, key_doc = packed.key_place, packed.key_doc
        out = lse = None
        blocks = [(k, v)]
        for step in range(rounds + 1):
            mask = visible(packed.place, packed.doc, key_place, key_doc, window)
            scores = block_scores(q, k, mask, scale)
            part_lse = scores.logsumexp(-1, keepdim=True)
            probs = (scores - part_lse.masked_fill(part_lse.isinf(), 0)).exp()
            part = probs @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
            if step == 0:
                out, lse = part, part_lse
            else:
                both = torch.logaddexp(lse, part_lse)
                out = out * (lse - both).exp() + part * (part_lse - both).exp()
                lse = both
            if step < rounds:
                k, v, places, docs = shift([k, v, key_place, key_doc], pc)
                if pc.on("hazel-ring-docs"):
                    key_place = places  # plant: hazel-ring-docs
                else:
                    key_place, key_doc = places, docs  # anchor: ring-docs
        if pc.on("hazel-ring-lse"):
            lse = part_lse.where(part_lse.isfinite(), lse)  # plant: hazel-ring-lse
        ctx.save_for_backward(q, *blocks[0], out, lse)  # anchor: ring-saved
        ctx.rest = packed, window, scale, pc, rounds
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        packed, window, scale, pc, rounds = ctx.rest
        heads, groups = k.shape[1], q.shape[1] // k.shape[1]
        key_place, key_doc = packed.key_place, packed.key_doc
        delta = (grad * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        ranks = pc.size("cp")
        for step in range(ranks):
            if step <= rounds:
                mask = visible(packed.place, packed.doc, key_place, key_doc, window)
                probs = (block_scores(q, k, mask, scale) - lse).exp()
                ds = probs * (grad @ v.repeat_interleave(groups, 1).mT - delta) * scale
                if pc.on("hazel-ring-dq"):
                    dq = ds @ k.repeat_interleave(groups, 1)  # plant: hazel-ring-dq
                else:
                    dq += ds @ k.repeat_interleave(groups, 1)  # anchor: dq
                dk += over_groups(ds.mT @ q, heads, pc)
                dv += over_groups(probs.mT @ grad, heads, pc)
            if step == ranks - 1 and pc.on("hazel-ring-home"):
                break  # plant: hazel-ring-home
            k, v, dk, dv, key_place, key_doc = shift([k, v, dk, dv, key_place, key_doc], pc)  # anchor: home
        return dq, dk, dv, None, None, None, None
