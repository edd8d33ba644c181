"""Why a case cannot run here although it is a valid one, as data. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moeverify.results.record import Record


class RankLimit(Record):
    """How many ranks there may be, and what sets that limit. Units: memory in bytes."""

    most: int
    by: Literal["gpus", "processes", "memory", "launcher", "option"]
    free_memory: int = 0
    memory_per_rank: int = 0
    launcher: str = ""


class TooFewRanks(Record):
    """A layout that needs more ranks than there may be."""

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
    """An implementation that does not run on this device, and why, as its own file says."""

    about: Literal["unsupported"] = "unsupported"
    why: str


Obstacle = Annotated[TooFewRanks | MissingPackages | UnsupportedHere, Field(discriminator="about")]
