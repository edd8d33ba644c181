"""Start of the guard in this process."""

from __future__ import annotations

from moeverify.scripts.guard.guard import Guard
from moeverify.scripts.guard.settings import GuardSettings
from moeverify.train.calls.hooks import install


def start(text: str, rank: str | None = None, world_size: str | None = None) -> Guard:
    """Guard this process from now on; `text` is JSON settings, `rank` and `world_size` are the launcher's."""
    guard = Guard(GuardSettings.model_validate_json(text), int(rank or 0), int(world_size or 1))
    install(guard)
    return guard
