"""The states of a rank's random generators: seeded by rank, saved by rank, restored where the layout is the same.

Nothing in the reference recipe is random (values come from a hash of seed, name and index), but what trains
beside it may be: dropout, jitter, sampling. A generator's state belongs to a rank of one layout and has no
meaning in another, so there it is seeded anew, from the seed, the step and the rank: every rank its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.hashing import key_of
from moeverify.layout.local_shard import LocalShard
from moeverify.layout.region import Region

PREFIX = "rng/"
"""How the names of generators' states begin."""


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators of this process."""
    torch.manual_seed(key_of(seed, "rng", step, rank))


def read_generators(rank: int, device: torch.device) -> list[LocalShard]:
    """Return copies of the states of torch's generators of this process, (bytes,) uint8 each."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return [_hold(f"{PREFIX}{rank:05d}/{name}", state) for name, state in states.items()]


def write_generators(states: Sequence[LocalShard], device: torch.device) -> None:
    """Put states that `read_generators` returned, or a load has filled, into the generators."""
    for shard in states:
        if shard.name.endswith("/cuda"):
            torch.cuda.set_rng_state(shard.tensor, device)
        else:
            torch.set_rng_state(shard.tensor)


def _hold(name: str, state: Tensor) -> LocalShard:
    return LocalShard(name, state, Region.whole(state.shape))
