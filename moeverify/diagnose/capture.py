"""Captures wrong tensors on every rank while a step is run again, and puts together what the ranks have of each.

Only what is wrong is gathered, and at most `LIMIT` elements of it on a rank, so a diagnosis costs the same however
large the model is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from moeverify.diagnose.wrong_tensor import Key, RankShard, WrongTensor
from moeverify.layout.region import Region

LIMIT = 1 << 23  # elements: 64 MiB in float64

Captured = tuple[Key, Region, Tensor | None]


class Capture:
    """An observer that keeps the local values of chosen logical tensors."""

    def __init__(self, wanted: Sequence[Key]) -> None:
        self._wanted = set(wanted)
        self._room = LIMIT
        self.captured: list[Captured] = []

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Keep what this rank has of a tensor if it is wanted; see `moeverify.layout.observer.Observer`."""
        key = (step, kind, name)
        if key not in self._wanted or region.numel > self._room:
            return
        self._room -= region.numel
        copy = None if local is None else local.detach().to("cpu", copy=True).reshape(region.local_shape)
        self.captured.append((key, region, copy))


def assemble_tensors(
    by_rank: Sequence[Sequence[Captured]], read: Callable[[Key], Tensor | None], precision: torch.dtype
) -> Mapping[Key, WrongTensor]:
    """Return the wrong tensors from what every rank has captured; `read` gives the golden's whole tensor."""
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
    """Return the golden's shape and that under the layout, by name, where these differ."""
    found: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for captured in by_rank:
        for key, region, _ in captured:
            expected = read(key) if key[2] not in found else None
            if expected is not None and tuple(expected.shape) != tuple(region.shape):
                found[key[2]] = (tuple(expected.shape), tuple(region.shape))
    return found


def _has_shape(members: Sequence[RankShard], expected: Tensor) -> bool:
    return all(tuple(shard.region.shape) == tuple(expected.shape) for shard in members)
