"""What makes results of ranks wrong, as operators of their programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moeverify.explain.edits import Edit
from moeverify.explain.joint import At
from moeverify.explain.suspects import Target


@dataclass
class Cause:
    """What makes results wrong: operators at one place of the program, and the edits that repair them, if any did.

    `repairs` say the same: they are rivals. `ops` are the operators of all ranks and layers. `repaired` names results
    that the first of `repairs` makes right, with the largest relative error that is left of them. `stretch` are the
    operators up to the next end of a module. `known` says how the wrong results are values of one device: `factor`
    times the right ones, parts of a sum, or right values in other places. In a race, `launch` is the collective that
    may still use the memory that `ops` use.
    """

    ops: list[At]
    repairs: list[Edit] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    residual: float | None = None
    stretch: list[At] = field(default_factory=list)
    known: Literal["", "scale", "reduction", "moved", "race"] = ""
    launch: At | None = None
    factor: float = 1.0
