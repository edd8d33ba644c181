"""Capture of wrong tensors on every rank during a repeated step, and assembly of the whole tensors.

Only wrong tensors are captured, at most `LIMIT` elements on a rank. The cost of a diagnosis does not grow
with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from moeverify.explain.fitting.wrong_tensor import Key, RankShard, WrongTensor
from moeverify.parallel.regions.region import Region

LIMIT = 1 << 23  # elements: 64 MiB in float64

Captured = tuple[Key, Region, Tensor | None]


class Capture:
    """Observer that keeps the local values of selected logical tensors."""

    def __init__(self, wanted: Sequence[Key]) -> None:
        self._wanted = set(wanted)
        self._room = LIMIT
        self.captured: list[Captured] = []

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Keep this rank's part of a tensor, if selected; see `moeverify.parallel.regions.observer.Observer`."""
        key = (step, kind, name)
        if key not in self._wanted or region.numel > self._room:
            return
        self._room -= region.numel
        copy = None if local is None else local.detach().to("cpu", copy=True).reshape(region.local_shape)
        self.captured.append((key, region, copy))


def assemble_tensors(
    by_rank: Sequence[Sequence[Captured]], read: Callable[[Key], Tensor | None], precision: torch.dtype
) -> Mapping[Key, WrongTensor]:
    """Assemble the wrong tensors from the captures of all ranks; `read` returns the golden's whole tensor.

    Tensors without a golden, of another shape, or with more than `LIMIT` elements are omitted.
    """
    shards: dict[Key, list[RankShard]] = {}
    for rank, captured in enumerate(by_rank):
        for key, region, local in captured:
            shards.setdefault(key, []).append(RankShard(rank, region, local))
    tensors: dict[Key, WrongTensor] = {}
    for key, members in shards.items():
        expected = read(key)
        if expected is not None and expected.numel() <= LIMIT and _has_shape(members, expected):
            whole = expected.to("cpu", torch.float64)
            tensors[key] = WrongTensor(key, whole, tuple(members), precision)
    return tensors


def find_other_shapes(
    by_rank: Sequence[Sequence[Captured]], read: Callable[[Key], Tensor | None]
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return, by name, (golden shape, shape under the layout) of tensors whose shapes differ."""
    found: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for captured in by_rank:
        for key, region, _ in captured:
            expected = read(key) if key[2] not in found else None
            if expected is not None and tuple(expected.shape) != tuple(region.shape):
                found[key[2]] = (tuple(expected.shape), tuple(region.shape))
    return found


def _has_shape(members: Sequence[RankShard], expected: Tensor) -> bool:
    return all(tuple(shard.region.shape) == tuple(expected.shape) for shard in members)
