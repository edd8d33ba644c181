"""States of a rank's random generators: seeded per rank, saved per rank, restored under the same layout.

The reference recipe draws no random numbers: values are hashes of seed, name and index. Other code in the
run may draw them, for dropout, jitter or sampling. A generator's state belongs to a rank of one layout and
has no meaning in another layout. There each rank is seeded anew from the seed, the step and its rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.hashing import key_of
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.region import Region

PREFIX = "rng/"
"""Prefix of the names of generator states."""


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators of this process."""
    torch.manual_seed(key_of(seed, "rng", step, rank))


def read_generators(rank: int, device: torch.device) -> list[LocalShard]:
    """Return copies of the states of torch's generators, each (bytes,) uint8."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return [_hold(f"{PREFIX}{rank:05d}/{name}", state) for name, state in states.items()]


def write_generators(states: Sequence[LocalShard], device: torch.device) -> None:
    """Restore generator states from `read_generators` or from a checkpoint."""
    for shard in states:
        if shard.name.endswith("/cuda"):
            torch.cuda.set_rng_state(shard.tensor, device)
        else:
            torch.set_rng_state(shard.tensor)


def _hold(name: str, state: Tensor) -> LocalShard:
    return LocalShard(name, state, Region.whole(state.shape))
