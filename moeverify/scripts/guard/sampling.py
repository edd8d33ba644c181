"""Samples of one step of a rank, and the description of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.results.finding import Finding
from moeverify.scripts.guard.lines import ClipLine, Nonfinite, SumLine, TensorLine
from moeverify.scripts.guard.samples import is_varied
from moeverify.scripts.record.lines import Options
from moeverify.train.calls.call import LoopCall


class Sampling:
    """Samples of the current step; parameters are keyed by id."""

    def __init__(self) -> None:
        self.has_backward = False
        self.kept: dict[int, float] = {}  # norms of the gradients before the first backward pass
        self.before: dict[int, float] = {}  # the same after the last backward pass, or before the clip
        self.clipped: dict[int, float] = {}
        self.clips: list[tuple[float | None, float | None, dict[int, float]]] = []
        self.forgotten: tuple[str, ...] = ()
        self.closures: set[int] = set()
        self.stepped: set[int] = set()
        self.began: list[int] = []
        self.gradients: dict[int, tuple[int, float]] = {}  # number of the tensor -> hash, sum of squares
        self.partial: list[int] = []
        self.rows: list[tuple[int, ...]] = []
        self.data_site = ""
        self.num_off = 0  # dropout modules of the forward passes in evaluation mode
        self.after: dict[int, int] = {}  # number of the tensor -> hash after the optimizer's step
        self.options: list[Options] = []
        self.calls: list[LoopCall] = []
        self.groups: tuple[Any, ...] | None = None
        self.exchanged: tuple[tuple[int, ...], ...] = ()
        self.sums: tuple[SumLine, ...] = ()
        self.is_traced = True
        self.is_known_kind = True
        self.takes_any = False
        self._recomputed: set[int] = set()  # optimizers whose updates another one makes, of a known kind
        self.unjudged: list[str] = []
        self.nonfinite: Nonfinite | None = None
        self.findings: list[Finding] = []

    def note_kind(self, optimizer: Optimizer, enclosing: Optimizer | None, unjudged: Sequence[str]) -> None:
        """Store whether an optimizer's updates are recomputed: its own, or those of the one that it steps."""
        if enclosing is not None and not unjudged:
            self._recomputed.add(id(enclosing))
        if enclosing is None and id(optimizer) not in self._recomputed:
            self.unjudged += unjudged
            self.is_known_kind &= not unjudged

    def list_clips(self, numbers: Mapping[int, int]) -> tuple[ClipLine, ...]:
        """Return the clips; `numbers` has the number of each tensor by the id of its parameter."""
        return tuple(
            ClipLine(
                norm=norm,
                max_norm=most,
                squares={numbers[each]: size**2 for each, size in norms.items() if each in numbers},
            )
            for norm, most, norms in self.clips
        )


def describe_tensors(
    shards: Sequence[LocalShard], uses: Mapping[int, str], positions: Mapping[int, tuple[int, int]]
) -> tuple[TensorLine, ...]:
    """Return descriptions of shards for the judge.

    By id of the parameter, `uses` has the call sites of modules, and `positions` the numbers of positions and
    features of their outputs.
    """
    varied = is_varied([shard.local() for shard in shards])
    return tuple(
        TensorLine(
            name=shard.name,
            shape=shard.region.shape,
            region=shard.region.key,
            is_whole=shard.region.is_whole,
            mesh=_list_ranks(shard.tensor),
            eps=torch.finfo(shard.tensor.dtype).eps if shard.tensor.is_floating_point() else 0.0,
            is_varied=is_one,
            site=uses.get(id(shard.tensor), ""),
            num_positions=_choose_positions(shard.tensor, positions.get(id(shard.tensor), (0, 0))),
        )
        for shard, is_one in zip(shards, varied, strict=True)
    )


def _list_ranks(parameter: Tensor) -> tuple[int, ...]:
    if not isinstance(parameter, DTensor):
        return ()
    return tuple(sorted(parameter.device_mesh.mesh.flatten().tolist()))


def _choose_positions(parameter: Tensor, positions: tuple[int, int]) -> int:
    # A vector of another size, such as one for each channel of an image, is not applied along the last dim.
    return positions[0] if parameter.ndim != 1 or len(parameter) == positions[1] else 0
