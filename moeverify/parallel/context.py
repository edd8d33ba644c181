"""Context parallelism: the positions of a sequence are split over the ranks of the cp axis.

`moeverify.axes.split` says which positions a rank sees. Three cores:

- `allgather`: every rank gathers all keys and values and attends with its own queries. Backward: the
  gradients of keys and values are summed over the ranks and each keeps its own part.
- `alltoall`: every rank trades its part of all heads for all positions of some heads, attends, and trades
  back (DeepSpeed Ulysses, arXiv 2309.14509).
- `torch`: torch.distributed.tensor.experimental.context_parallel, its ring of fused kernels, on GPUs only.

Letters: B rows, s local positions, S all positions, N heads, D width of a head (values may have
another than queries and keys), n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

from moeverify.axes.split import ContextKind
from moeverify.model.attention import Attention, Core, attend
from moeverify.model.mla import LatentAttention
from moeverify.parallel.collectives import all_gather_sum, exchange_rows
from moeverify.parallel.ddp import Accumulate
from moeverify.seams import seam


@seam
def apply_context_parallel(model: nn.Module, kind: ContextKind, group: ProcessGroup) -> None:
    """Replace the core of every attention, so that queries reach the keys and values of all ranks.

    The model must then be called with this rank's tokens and their positions in the whole sequence.
    """
    cores: Mapping[str, Callable[[ProcessGroup], Core]] = {
        "allgather": _AllGatherCore,
        "alltoall": AllToAllCore,
        "torch": _TorchCore,
    }
    core = cores[kind](group)
    for attention in _attentions(model):
        attention.core = core


def surround(accumulate: Accumulate, mesh: DeviceMesh, device: torch.device) -> Accumulate:
    """Return the context of a micro-batch with torch's context parallelism over `mesh` (cp) around it.

    Forward and backward must both be inside.
    """

    @contextmanager
    def micro_batch(last: bool) -> Iterator[None]:
        # It wants something to split; the tokens are split already, in the same zigzag.
        dummy = torch.zeros(2 * mesh.size(), device=device)
        with context_parallel(mesh, buffers=[dummy], buffer_seq_dims=[0]), accumulate(last):
            yield

    def surrounded(last: bool) -> AbstractContextManager[None]:
        return micro_batch(last)

    return surrounded


def _attentions(model: nn.Module) -> Iterator[Attention | LatentAttention]:
    for module in model.modules():
        if isinstance(module, Attention | LatentAttention):
            yield module


class _AllGatherCore:
    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        keys = all_gather_sum(k, 1, self.group)
        values = all_gather_sum(v, 1, self.group)
        key_positions = all_gather_sum(positions, 1, self.group)
        return attend(q, keys, values, positions, key_positions)


class AllToAllCore:
    """Attention of all positions for some of the heads: ranks exchange positions for heads, and back (Ulysses)."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    @seam
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        whole = all_gather_sum(positions, 1, self.group)
        heads = attend(self.to_heads(q), self.to_heads(k), self.to_heads(v), whole, whole)
        return self.to_positions(heads)

    def to_heads(self, x: Tensor) -> Tensor:
        """(B, s, N, D) of all heads -> (B, S, N/n, D) of this rank's heads."""
        num_ranks = self.group.size()
        parts = torch.stack(x.chunk(num_ranks, dim=2)).contiguous()  # part r goes to rank r
        return torch.cat(self._trade(parts).unbind(), dim=1)

    def to_positions(self, x: Tensor) -> Tensor:
        """(B, S, N/n, D) of this rank's heads -> (B, s, N, D) of all heads."""
        parts = torch.stack(x.chunk(self.group.size(), dim=1)).contiguous()
        return torch.cat(self._trade(parts).unbind(), dim=2)

    def _trade(self, parts: Tensor) -> Tensor:
        ones = [1] * self.group.size()
        return exchange_rows(parts, ones, ones, self.group)


class _TorchCore:
    """Inside of `surround`, torch's fused attention reaches the keys and values of all ranks."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        heads = q.shape[2] // k.shape[2]  # it knows no groups of query heads
        whole = (q, k.repeat_interleave(heads, dim=2), v.repeat_interleave(heads, dim=2))
        queries, keys, values = (x.transpose(1, 2) for x in whole)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return mixed.transpose(1, 2)
