"""The names of the collectives that `moeverify comm` runs, apart since the `--help` of every command reads them."""

from __future__ import annotations

from enum import StrEnum


class Collective(StrEnum):
    """The collectives of `moeverify comm`, called as torch.distributed calls them."""

    ALL_TO_ALL = "all_to_all"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
