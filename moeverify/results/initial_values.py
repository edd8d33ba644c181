"""Sources of initial values."""

from __future__ import annotations

from typing import Literal

InitialSource = Literal["seed", "factory", "weights"]
"""The source of correct initial values: the seed with FQN and global index, a user's factory, or a folder."""
