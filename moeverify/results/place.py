"""Place of a finding."""

from __future__ import annotations

from enum import StrEnum

from moeverify.results.collective import IssuedCollective
from moeverify.results.part import Part
from moeverify.results.record import Record


class Stage(StrEnum):
    """A part of a training step, or of the work around it."""

    INITIALIZATION = "initialization"
    DATA = "data"
    FORWARD = "forward"
    ROUTING = "routing"
    LOSS = "loss"
    BACKWARD = "backward"
    GRADIENT_NORM = "gradient norm"
    CLIP = "clip"
    OPTIMIZER_STEP = "optimizer step"
    STATE = "state"
    LOAD = "load"


class UserCall(Record):
    """A line of the user's code (file:line), and the call there, such as `backward`."""

    name: str
    site: str


class Place(Record):
    """The place where a finding acts: module, wrong ranks, explaining mesh axes and parts of the tensor.

    `issued` are the collectives that the worst rank issued inside `issued_in`, or None if they were not
    recorded. `issued_in` is the module, or the nearest enclosing module with collectives. `collectives` is
    `issued` in words; it is filled when JSON is written.
    """

    module: str = ""
    ranks: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    stage: Stage | None = None
    parts: tuple[Part, ...] = ()
    issued: tuple[IssuedCollective, ...] | None = None
    issued_in: str = ""
    collectives: tuple[str, ...] = ()
