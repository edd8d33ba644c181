"""Reasons why a valid case cannot run on this machine, as data. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moeverify.results.record import Record


class RankLimit(Record):
    """The maximum number of ranks, and the source of this limit. Units: memory in bytes."""

    most: int
    by: Literal["gpus", "processes", "memory", "launcher", "option"]
    free_memory: int = 0
    memory_per_rank: int = 0
    launcher: str = ""


class TooFewRanks(Record):
    """A layout that needs more ranks than the limit allows."""

    about: Literal["ranks"] = "ranks"
    num_needed: int
    limit: RankLimit


class MissingPackages(Record):
    """An implementation whose packages cannot be imported."""

    about: Literal["packages"] = "packages"
    needed_by: str
    packages: tuple[str, ...]
    install: str


class UnsupportedHere(Record):
    """An implementation that does not support this device. `why` comes from the implementation itself."""

    about: Literal["unsupported"] = "unsupported"
    why: str


Obstacle = Annotated[TooFewRanks | MissingPackages | UnsupportedHere, Field(discriminator="about")]
