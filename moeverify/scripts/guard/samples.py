"""Hashes, projections and norms of a few elements of many tensors, in a handful of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeverify.hashing import hash_counter, key_of
from moeverify.parallel.regions.placement import local_part
from moeverify.verification.compare.difference import INTEGERS, hash_words

NUM_ELEMENTS = 256
"""Number of equally spaced elements that represent a tensor: an update changes nearly all of its elements."""

_NUM_PROJECTIONS = 4
_KEY = key_of("guard", "projections")


@dataclass
class Samples:
    """Samples of N tensors: a hash of the sampled bits, projections on random signs, and the norm.

    All are 0 for a missing tensor.
    """

    hashes: list[int] = field(default_factory=list)
    projections: list[tuple[float, ...]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def measure_samples(tensors: Sequence[Tensor | None], *, only_hashes: bool = False) -> Samples:
    """Return the samples of local tensors. Synchronizes with the device once per device and dtype.

    `only_hashes` leaves projections and norms at 0, which cost more than the hashes.
    """
    count = len(tensors)
    found = Samples([0] * count, [(0.0,) * _NUM_PROJECTIONS] * count, [0.0] * count)
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor is not None and tensor.numel():
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(number)
    for numbers in by_kind.values():
        picked = [pick(tensor) for number in numbers if (tensor := tensors[number]) is not None]
        hashes, sums = _measure(picked, only_hashes=only_hashes)
        for number, bits, row in zip(numbers, hashes, sums, strict=True):
            found.hashes[number] = bits or 1  # 0 marks a missing tensor
            found.projections[number] = tuple(row[:_NUM_PROJECTIONS])
            found.norms[number] = row[_NUM_PROJECTIONS] ** 0.5
    return found


def is_varied(tensors: Sequence[Tensor]) -> list[bool]:
    """Return for each tensor whether its sampled elements differ. Synchronizes with each device once."""
    found = [False] * len(tensors)
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel() > 1:
            picked = pick(tensor)
            by_device.setdefault(tensor.device, []).append((number, (picked != picked[0]).any()))
    for flags in by_device.values():
        values = torch.stack([flag for _, flag in flags]).tolist()
        for (number, _), value in zip(flags, values, strict=True):
            found[number] = bool(value)
    return found


def count_positions(tensor: Tensor) -> tuple[int, int]:
    """Return the numbers of positions and features of a local tensor; features are the last dim of floats."""
    local = local_part(tensor)
    features = local.shape[-1] if local.ndim and local.is_floating_point() else 1
    return local.numel() // max(features, 1), features


def pick(tensor: Tensor) -> Tensor:
    """Return equally spaced elements of a tensor, at the same places for tensors of equal size."""
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // NUM_ELEMENTS)]


def _measure(picked: Sequence[Tensor], *, only_hashes: bool) -> tuple[list[int], list[list[float]]]:
    """Return hashes (N,), and projections and sums of squares (N, P + 1), of tensors of one dtype."""
    nothing = [0.0] * (_NUM_PROJECTIONS + 1)
    values = torch.cat(list(picked))
    device = values.device
    sizes = torch.tensor([each.numel() for each in picked], device=device)
    owner = torch.arange(len(picked), device=device).repeat_interleave(sizes)
    places = torch.arange(len(values), device=device) - (sizes.cumsum(0) - sizes)[owner]
    words = values.view(INTEGERS[values.element_size()]).to(torch.int64)
    hashes = torch.zeros(len(picked), dtype=torch.int64, device=device)
    hashes.index_add_(0, owner, hash_words(words, places))
    if only_hashes:
        return hashes.tolist(), [nothing] * len(picked)
    shifts = torch.arange(_NUM_PROJECTIONS, device=device)
    signs = 1.0 - 2.0 * ((hash_counter(_KEY, places)[:, None] >> shifts) & 1)
    wide = values.to(torch.float64)[:, None]
    columns = torch.cat([wide * signs, wide * wide], dim=1)
    sums = torch.zeros((len(picked), _NUM_PROJECTIONS + 1), dtype=torch.float64, device=device)
    return hashes.tolist(), sums.index_add_(0, owner, columns).tolist()
