"""The place of a finding."""

from __future__ import annotations

from enum import StrEnum

from moeverify.results.collective import IssuedCollective
from moeverify.results.part import Part
from moeverify.results.record import Record


class Stage(StrEnum):
    """A part of a training step, or of what is around it."""

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


class Place(Record):
    """Where a finding acts: a module, the ranks that are wrong, the mesh axes that explain it, parts of the tensor.

    `issued` are the collectives that the worst rank issued inside `issued_in`, which is the module or the nearest
    one around it that has some; None where nobody looked. `tensor` is another tensor that plays a part.
    `collectives` says the same as `issued` for a reader, and is filled when JSON is written.
    """

    module: str = ""
    ranks: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    stage: Stage | None = None
    parts: tuple[Part, ...] = ()
    dim: int | None = None
    tensor: str = ""
    issued: tuple[IssuedCollective, ...] | None = None
    issued_in: str = ""
    collectives: tuple[str, ...] = ()
