"""Where initial values come from."""

from __future__ import annotations

from typing import Literal

InitialSource = Literal["seed", "factory", "weights"]
"""Where the right ones come from: seed, FQN and global index give them, a user's factory, or a folder of weights."""
