"""Keys and values travel around a ring of ranks, and each rank adds up what its queries see of each.

Backward: the exchanges go round the other way. Positions are split in zigzag, so that causal attention costs every
rank the same in every round. A rank keeps scores of its own positions by those of one other rank at a time, where
`allgather` keeps them by all.

Source: Ring Attention (arXiv 2310.01889); the sums over blocks as in online softmax (arXiv 1805.02867).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeverify.parallel.context_parallel import ContextVariant

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class RingExchangeCore:
    """Attends to the keys and values of one rank after the other.

    Letters: B rows, s positions of a rank, Nq heads of queries, g for each of Nkv heads, D width of a head.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """Return the mixed values (B, s, Nq, Dv) of q, k, v (B, s, N, D); see `moeverify.model.attention.Core`."""
        import torch

        from moeverify.model.precision import widen

        num_kv_heads, width = k.shape[-2:]
        wide = widen(q.dtype)
        queries = q.view(*q.shape[:2], num_kv_heads, -1, width).permute(0, 2, 3, 1, 4)  # (B, Nkv, g, s, D)
        key_positions, largest, mixed, total = positions, None, None, None
        for number in range(self.group.size()):
            if number:
                k, v, key_positions = self._pass_on(k), self._pass_on(v), self._pass_on(key_positions)
            keys, values = k.permute(0, 2, 3, 1).unsqueeze(2), v.transpose(1, 2).unsqueeze(2)
            scores = (queries @ keys).to(wide) * width**-0.5  # (B, Nkv, g, s, s)
            hidden = key_positions.unsqueeze(1) > positions.unsqueeze(2)
            scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
            # What is subtracted before the exponential cancels, in the gradient too. A rank's own keys come first, of
            # which every query sees one at least, so the largest score is finite from then on.
            best = scores.detach().amax(dim=-1, keepdim=True)
            best = best if largest is None else torch.maximum(largest, best)
            share = (scores - best).exp()
            added, weight = share.to(v.dtype) @ values, share.sum(dim=-1, keepdim=True)
            if largest is not None:
                shrink = (largest - best).exp()
                added, weight = added + mixed * shrink.to(v.dtype), weight + total * shrink
            largest, mixed, total = best, added, weight
        assert mixed is not None
        assert total is not None
        outputs: Tensor = mixed / total.to(v.dtype)
        return outputs.permute(0, 3, 1, 2, 4).flatten(2, 3)

    def _pass_on(self, x: Tensor) -> Tensor:
        """Return what the rank before has, and send this rank's to the next one."""
        from moeverify.parallel.collectives import exchange_rows

        num_ranks, rank = self.group.size(), self.group.rank()
        receive, send = [0] * num_ranks, [0] * num_ranks
        receive[rank - 1] = send[(rank + 1) % num_ranks] = x.shape[0]
        return exchange_rows(x.contiguous(), receive, send, self.group)


class _Ring(ContextVariant):
    def make_core(self, group: ProcessGroup) -> RingExchangeCore:
        return RingExchangeCore(group)


IMPLEMENTATION = _Ring()
