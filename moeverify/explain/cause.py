"""The cause of wrong results, as operators of the ranks' programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moeverify.explain.edits import Edit
from moeverify.explain.joint import At
from moeverify.explain.suspects import Target


@dataclass
class Cause:
    """The cause of wrong results: operators at one place of the program, and the edits that repair them, if any did.

    `repairs` are alternatives: each repairs the same. `ops` are the operators of all ranks and layers. `repaired`
    names results that the first of `repairs` makes right; `residual` is their largest relative error after it.
    `stretch` are the operators up to the next end of a module. `known` says how the wrong results relate to values of
    one device: they are `factor` times the right ones, parts of a sum, or right values in other places. In a race,
    `launch` is the collective that may still use the memory that `ops` use.
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
    is_local: bool = False
