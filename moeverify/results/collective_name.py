"""Names of the collectives that `moeverify comm` runs.

They are in a module of their own because the `--help` text of every command imports them.
"""

from __future__ import annotations

from enum import StrEnum


class CollectiveName(StrEnum):
    """The collectives of `moeverify comm`, with the names that torch.distributed uses."""

    ALL_TO_ALL = "all_to_all"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
