"""Start of the recording in this process."""

from __future__ import annotations

import random

import torch

from moeverify.scripts.record.recorder import Recorder
from moeverify.scripts.record.settings import Settings
from moeverify.train.calls.hooks import install


def start(text: str, rank: str | None = None, world_size: str | None = None) -> Recorder:
    """Record the training of this process from now on, and return the recorder.

    `text` has the settings as JSON. `rank` and `world_size` come from the launcher and are used until a
    process group exists.
    """
    settings = Settings.model_validate_json(text)
    if settings.seed is not None:
        seed_all(settings.seed)
    recorder = Recorder(settings, int(rank or 0), int(world_size or 1))
    install(recorder)
    return recorder


def seed_all(seed: int) -> None:
    """Seed the generators of torch, NumPy and Python. A script may seed them again later."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
