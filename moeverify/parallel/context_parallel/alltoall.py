"""Every rank trades its part of all heads for all positions of some heads, attends, and trades back.

Positions are split into contiguous runs. Each rank attends to whole rows with its heads, so the work is
balanced without a zigzag.

Source: DeepSpeed Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moeverify.cases.axes.split import IN_RUNS
from moeverify.cases.rule import blame, own_model, reading
from moeverify.cases.schema import Case
from moeverify.errors import Problem
from moeverify.parallel.context_parallel import ContextVariant
from moeverify.seams import seam

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class AllToAllCore:
    """Attention core for a subset of heads and all positions, with one all-to-all before and one after.

    Notation: B rows, s positions of this rank, S positions of all ranks, N heads, D head width, n ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    @seam
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """Return the mixed values; see `moeverify.model.attention.Core`.

        Shapes: q, k, v (B, s, N, D), positions (B, s); returns (B, s, Nq, Dv).
        """
        from moeverify.model.attention import attend
        from moeverify.parallel.collectives import all_gather_sum

        whole = all_gather_sum(positions, 1, self.group)
        heads = attend(self.to_heads(q), self.to_heads(k), self.to_heads(v), whole, whole)
        return self.to_positions(heads)

    def to_heads(self, x: Tensor) -> Tensor:
        """Return (B, S, N/n, D), the heads of this rank, for x (B, s, N, D)."""
        import torch

        num_ranks = self.group.size()
        # (n, B, s, N/n, D): part r goes to rank r. Parts arrive in rank order. Positions are split into
        # runs, so rank order is sequence order.
        parts = torch.stack(x.chunk(num_ranks, dim=2)).contiguous()
        return torch.cat(self._trade(parts).unbind(), dim=1)

    def to_positions(self, x: Tensor) -> Tensor:
        """Return (B, s, N, D), the positions of this rank, for x (B, S, N/n, D)."""
        import torch

        parts = torch.stack(x.chunk(self.group.size(), dim=1)).contiguous()
        return torch.cat(self._trade(parts).unbind(), dim=2)

    def _trade(self, parts: Tensor) -> Tensor:
        from moeverify.parallel.collectives import exchange_rows

        ones = [1] * self.group.size()
        return exchange_rows(parts, ones, ones, self.group)


@reading(
    "layout.cp", "layout.tp", "layout.context_parallel", "recipe.model.num_heads", "recipe.model.num_kv_heads"
)
def whole_heads(case: Case) -> Iterator[Problem]:
    """Each context rank takes a whole number of heads."""
    model, layout = own_model(case), case.layout
    if model is None or layout.cp == 1:
        return
    for name in ("num_heads", "num_kv_heads"):
        value = getattr(model, name)
        if value % layout.tp == 0 and (value // layout.tp) % layout.cp:
            over = f"{name} {value}" + (f" / tp {layout.tp}" if layout.tp > 1 else "")
            message = f"{over} is not divisible by cp {layout.cp}, as context_parallel `alltoall` needs"
            yield blame("layout.context_parallel", message, "write `allgather`, or change cp")


class _AllToAll(ContextVariant):
    split = IN_RUNS
    rules = (whole_heads,)

    def make_core(self, group: ProcessGroup) -> AllToAllCore:
        return AllToAllCore(group)


IMPLEMENTATION = _AllToAll()
