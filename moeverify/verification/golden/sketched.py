"""Goldens of sketches: a record of megabytes for a model of any size.

A tensor is stored whole if it is small, or if runs need its values, such as the experts of each token. For
any other tensor the file of its step has a sketch (`moeverify.parallel.regions.sketch`). If the tensor must
match bit for bit, a further column has the hash of each block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from moeverify.parallel.regions.region import Region
from moeverify.parallel.regions.sketch import MOMENTS, WIDTH, estimate_squares, hash_blocks, sketch
from moeverify.results.checks import Kind
from moeverify.verification.golden.store import GoldenWriter, tensor_key

MOST_WHOLE = 1024
"""The largest number of elements of a tensor that is stored whole."""

_KEPT_WHOLE = frozenset({Kind.ROUTER_IDS, Kind.ROUTER_MARGIN, Kind.TOKEN_LOSS})
_EXACT = frozenset({Kind.INITIAL_WEIGHT, Kind.INITIAL_BUFFER})
_UNUSED = frozenset({Kind.WEIGHT})  # only forced steps read them

_Place = tuple[int, str]
"""(step, tensor key)"""


def is_kept_whole(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether a golden of sketches stores the values of a logical tensor."""
    return kind in _KEPT_WHOLE or not dtype.is_floating_point or math.prod(shape) <= MOST_WHOLE


def make_sketch(kind: str, local: Tensor, region: Region) -> Tensor:
    """Return a region's contribution to the sketch of a tensor, on its device; see `add_sketches`.

    Shape: (blocks, WIDTH), and a column more for kinds that must be equal bit for bit. float64.
    """
    numbers = sketch(local, region)
    if kind in _EXACT:
        hashed = hash_blocks(local, region).view(torch.float64)
        numbers = torch.cat([numbers, hashed.unsqueeze(1)], dim=1)
    return numbers


def add_sketches(one: Tensor, two: Tensor, times: int = 1) -> Tensor:
    """Return the sketch (blocks, WIDTH) of one region and `times` another one. Hashes are sums of integers.

    With `times` -1, the second region is taken out of the first.
    """
    total = one + times * two
    if one.shape[1] > WIDTH:
        hashes = [each[:, WIDTH].contiguous().view(torch.int64) for each in (one, two)]
        total[:, WIDTH] = (hashes[0] + times * hashes[1]).view(torch.float64)
    return total


def measure_squares(expected: Tensor, actual: Tensor) -> Tensor:
    """Return the estimated squared error of each block, (blocks,): zero if both have a hash and it is equal."""
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
        self.tensors: dict[_Place, Tensor] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._new: set[_Place] = set()

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
        found = make_sketch(kind, local, region).cpu()
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

    def measure_errors(self, golden: SketchRecorder) -> dict[_Place, float]:
        """Return the error of each tensor, relative to the norm of the golden's."""
        found: dict[_Place, float] = {}
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


def fingerprint(stored: Tensor) -> list[float]:
    """Return [norm, projection, projection] of a sketch, rounded to 13 digits, for the file in git.

    The signs of the projections differ from those of `moeverify.verification.golden.fingerprint`.
    """
    total = stored[:, :WIDTH].sum(dim=0)
    numbers = [total[MOMENTS.index("square")].sqrt(), *total[len(MOMENTS) : len(MOMENTS) + 2]]
    return [float(f"{number.item():.13g}") for number in numbers]
