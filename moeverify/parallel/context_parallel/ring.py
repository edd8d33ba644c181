"""Keys and values travel around a ring of ranks, and each rank adds up the attention of its queries.

Backward: the exchanges run in the opposite direction. Positions are split in zigzag, so that causal
attention costs the same on every rank in every round. A rank holds scores against the positions of one
other rank at a time, whereas `allgather` holds scores against all positions.

Source: Ring Attention (arXiv 2310.01889); block sums as in online softmax (arXiv 1805.02867).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeverify.parallel.context_parallel import ContextVariant

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class RingExchangeCore:
    """Attention core that processes the keys and values of one rank after the other.

    Notation: B rows, s positions of a rank, Nq query heads, Nkv key/value heads with g query heads each, D
    head width.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """Return the mixed values; see `moeverify.model.attention.Core`.

        Shapes: q, k, v (B, s, N, D), positions (B, s); returns (B, s, Nq, Dv).
        """
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
            # The maximum subtracted before the exponential cancels, also in the gradient. The rank's own
            # keys come first, and every query sees at least one of them, so the maximum is finite from then
            # on.
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
        """Send x to the next rank and return the x of the previous rank."""
        from moeverify.parallel.collectives import exchange_rows

        num_ranks, rank = self.group.size(), self.group.rank()
        receive, send = [0] * num_ranks, [0] * num_ranks
        receive[rank - 1] = send[(rank + 1) % num_ranks] = x.shape[0]
        return exchange_rows(x.contiguous(), receive, send, self.group)


class _Ring(ContextVariant):
    def make_core(self, group: ProcessGroup) -> RingExchangeCore:
        return RingExchangeCore(group)


IMPLEMENTATION = _Ring()
