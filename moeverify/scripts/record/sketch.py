"""A few numbers that summarize a tensor too large to store, and add up over its regions."""

from __future__ import annotations

import torch
from torch import Tensor

from moeverify.hashing import hash_counter, key_of
from moeverify.parallel.regions.region import Region

NUM_PROJECTIONS = 16
_KEY = key_of("watch", "sketch")
_CHUNK = 1 << 20


def sketch(local: Tensor, region: Region) -> list[float]:
    """Return the projections of a region on fixed random sign vectors, with one sign per global index.

    The mean square difference of two tensors' projections estimates the squared norm of their difference,
    with 16 projections to about a third. `local` has shape `region.local_shape`; the result has 16 numbers.
    """
    places = region.flat_index(local.device).reshape(-1)
    values = local.reshape(-1)
    total = torch.zeros(NUM_PROJECTIONS, dtype=torch.float64, device=local.device)
    shifts = torch.arange(NUM_PROJECTIONS, device=local.device)[:, None]
    for start in range(0, len(values), _CHUNK):
        hashed = hash_counter(_KEY, places[start : start + _CHUNK])
        signs = 1.0 - 2.0 * ((hashed[None, :] >> shifts) & 1).to(torch.float64)
        total += signs @ values[start : start + _CHUNK].to(torch.float64)
    return [float(value) for value in total.tolist()]
