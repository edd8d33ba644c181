"""A user's model as it was tried on one device, as data. No torch."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from moeverify.results.record import Record

ROWS, POSITIONS = 8, 16
"""The batch with which a model is tried, and that its recipe has."""


class TriedModel(Record):
    """A model as a recipe names it, and the layouts to try.

    `title` is the name of its class, and `framework` the package of a framework that its class is from.
    `changes` has the fields that were changed, as (before, after). `parameters` counts the elements of all
    parameters before and after. `guessed` has the sizes that the code leaves open, and the presets that are left
    out for them as None. `seconds` is the time of one step. `parallelize` is the user's function, with the names
    of further `arguments` that give a degree of expert parallelism.
    """

    title: str
    framework: str = ""
    factory: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    loss: str = ""
    vocab_size: int
    min_valid: float = 0.5
    changes: dict[str, tuple[int | float, int | float]] = Field(default_factory=dict)
    guessed: dict[str, int | None] = Field(default_factory=dict)
    parameters: tuple[int, int]
    seconds: float
    notes: tuple[str, ...] = ()
    parallelize: str = ""
    expert_degrees: tuple[str, ...] = ()


class Refused(Record):
    """Why a model cannot be verified, with a remedy; `path` is an option, or empty for the model itself."""

    message: str
    path: str = ""
    remedy: str = ""
