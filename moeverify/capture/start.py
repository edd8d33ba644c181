"""Starting the recording of this process."""

from __future__ import annotations

import random

import torch

from moeverify.calls.hooks import install
from moeverify.capture.recorder import Recorder
from moeverify.capture.settings import Settings


def start(text: str, rank: str | None = None, world_size: str | None = None) -> Recorder:
    """Record what this process trains from now on, and return the recorder.

    `text` are the settings as JSON; `rank` and `world_size` what the launcher says, for processes that record before
    they have a process group.
    """
    settings = Settings.model_validate_json(text)
    if settings.seed is not None:
        seed_all(settings.seed)
    recorder = Recorder(settings, int(rank or 0), int(world_size or 1))
    install(recorder)
    return recorder


def seed_all(seed: int) -> None:
    """Seed what torch, NumPy and Python draw from; a script that seeds itself later has the last word."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
