"""Goldens of sketches: a record of megabytes for a model of any size.

A tensor is stored whole if it is small, or if runs need its values, such as the experts of each token. Of any
other tensor the file of its step has the sketch (`moeverify.parallel.regions.sketch`), with the hash of each
block as a further column where a tensor must be equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from moeverify.parallel.regions.region import Region
from moeverify.parallel.regions.sketch import MOMENTS, WIDTH, estimate_squares, hash_blocks, sketch
from moeverify.results.checks import Kind
from moeverify.verification.golden.store import GoldenWriter, StoredGolden, tensor_key

MOST_WHOLE = 1024
"""The largest number of elements of a tensor that is stored whole."""

_KEPT_WHOLE = frozenset({Kind.ROUTER_IDS, Kind.ROUTER_MARGIN})
_EXACT = frozenset({Kind.INITIAL_WEIGHT, Kind.INITIAL_BUFFER})
_UNUSED = frozenset({Kind.WEIGHT})  # only forced steps read them

Place = tuple[int, str]
"""(step, tensor key)"""


def is_kept_whole(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether a golden of sketches stores the values of a logical tensor."""
    return kind in _KEPT_WHOLE or not dtype.is_floating_point or math.prod(shape) <= MOST_WHOLE


def make_sketch(kind: str, local: Tensor, region: Region) -> Tensor:
    """Return a region's contribution to the sketch of a tensor on the CPU; see `add_sketches`.

    Shape: (blocks, WIDTH), and a column more for kinds that must be equal bit for bit. float64.
    """
    numbers = sketch(local, region)
    if kind in _EXACT:
        hashed = hash_blocks(local, region).view(torch.float64)
        numbers = torch.cat([numbers, hashed.unsqueeze(1)], dim=1)
    return numbers.cpu()


def add_sketches(one: Tensor, two: Tensor) -> Tensor:
    """Return the sketch of two disjoint regions together. Hashes are sums of integers."""
    total = one + two
    if one.shape[1] > WIDTH:
        total[:, WIDTH] = (one[:, WIDTH].view(torch.int64) + two[:, WIDTH].view(torch.int64)).view(
            torch.float64
        )
    return total


def measure_squares(expected: Tensor, actual: Tensor) -> Tensor:
    """Return the estimated squared error of each block: exactly zero if both have a hash and it is equal."""
    squares = estimate_squares(expected[:, :WIDTH], actual[:, :WIDTH])
    if expected.shape[1] > WIDTH and actual.shape[1] > WIDTH:
        same = expected[:, WIDTH].contiguous().view(torch.int64) == actual[:, WIDTH].contiguous().view(
            torch.int64
        )
        least = expected[:, MOMENTS.index("square")].clamp(min=torch.finfo(torch.float64).tiny) * 2.0**-104
        squares = torch.where(same, 0.0, torch.maximum(squares, least))
    return squares


class SketchRecorder:
    """An observer that keeps small tensors, and the sketches of all others.

    `tensors` maps (step, key) to a whole tensor or to a sketch. `shapes` has the logical shape of each sketch.
    """

    def __init__(self) -> None:
        self.tensors: dict[Place, Tensor] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._new: set[Place] = set()

    def begin_step(self, step: int) -> None:
        """Do nothing, because each observation names its step."""

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Add one shard of a logical tensor; see `moeverify.parallel.regions.observer.Observer`."""
        if kind in _UNUSED:
            return
        if local is None:
            local = torch.zeros(region.local_shape, dtype=torch.float64)
        local = local.detach().reshape(region.local_shape)
        place = (step, tensor_key(kind, name))
        self._new.add(place)
        known = self.tensors.get(place)
        if is_kept_whole(kind, region.shape, local.dtype):
            if known is None:
                known = self.tensors[place] = torch.zeros(region.shape, dtype=local.dtype)
            region.put(known, local.cpu())
            return
        self.shapes[place[1]] = region.shape
        found = make_sketch(kind, local, region)
        self.tensors[place] = found if known is None else add_sketches(known, found)

    def take_new(self) -> dict[str, Tensor]:
        """Return the tensors that were observed since the last call, as `STEP/KEY`."""
        new, self._new = self._new, set()
        return {f"{step}/{key}": self.tensors[step, key] for step, key in sorted(new)}

    def restore(self, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Take tensors that `take_new` has returned in an earlier process."""
        for text, tensor in tensors.items():
            step, _, key = text.partition("/")
            self.tensors[int(step), key] = tensor
        self.shapes |= shapes

    def write(self, writer: GoldenWriter) -> None:
        """Write one file per step."""
        for step in sorted({step for step, _ in self.tensors}):
            writer.put(step, {key: tensor for (at, key), tensor in self.tensors.items() if at == step})

    def measure_errors(self, golden: SketchRecorder) -> dict[Place, float]:
        """Return the error of each tensor, relative to the norm of the golden's."""
        found: dict[Place, float] = {}
        for place, actual in self.tensors.items():
            expected = golden.tensors.get(place)
            if expected is None or expected.shape != actual.shape:
                continue
            if place[1] in self.shapes:
                error = measure_squares(expected, actual).sum().sqrt()
                norm = expected[:, MOMENTS.index("square")].sum().sqrt()
            else:
                error = (actual.double() - expected.double()).norm()
                norm = expected.double().norm()
            found[place] = float(error / norm) if norm > 0 else 0.0
        return found


def summarize_sketches(golden: StoredGolden, steps: range) -> dict[str, dict[str, float]]:
    """Return the losses and gradient norms of every step, for the file in git."""
    losses = {
        f"{step}/{key}": float(f"{golden.whole(step, key).item():.13g}")
        for step in steps
        for key in golden.keys(step)
        if key.partition("/")[0] in (Kind.LOSS, Kind.GRADIENT_NORM)
    }
    return {"losses": losses, "tensors": {}}
