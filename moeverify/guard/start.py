"""Starting the guard of this process."""

from __future__ import annotations

from moeverify.calls.hooks import install
from moeverify.guard.guard import Guard
from moeverify.guard.settings import GuardSettings


def start(text: str, rank: str | None = None, world_size: str | None = None) -> Guard:
    """Guard what this process trains from now on; `text` are the settings as JSON, the others the launcher's."""
    guard = Guard(GuardSettings.model_validate_json(text), int(rank or 0), int(world_size or 1))
    install(guard)
    return guard
