"""Causes of wrong results, as operators in the ranks' programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moeverify.explain.edit import Edit
from moeverify.explain.joint import At
from moeverify.explain.suspects import Target
from moeverify.results.culprit import SumPart


@dataclass
class OperatorCause:
    """A cause of wrong results: operators at one place of the program and the edits that repair them, if any.

    - `ops`: the operators of all ranks and layers.
    - `repairs`: alternative edits; each repairs the same results.
    - `repaired`: results that the first repair makes right.
    - `residual`: the largest relative error of these results after the repair.
    - `stretch`: the operators from `ops` to the next end of a module.
    - `known`: the relation of the wrong results to single-device values: multiplied by `factor` ("scale"),
      parts of a sum ("reduction"), right values in other places ("moved") or memory of another tensor
      ("shared"). "race" marks a race, "overwritten" a write to memory that a backward pass needs.
    - `sums`: in a "reduction", the parts with wrong weights, if they were fitted.
    - `launch`: in a race, the collective that may still use the memory that `ops` use, or the operator whose
      backward pass needs it.
    - `is_local`: the first repair alone only makes its own results right. Later operators were recorded with
      other sizes, or edits of the training loop's own operators belong to the repair and are left out.
    """

    ops: list[At]
    repairs: list[Edit] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    residual: float | None = None
    stretch: list[At] = field(default_factory=list)
    known: Literal["", "scale", "reduction", "moved", "shared", "race", "overwritten"] = ""
    sums: tuple[SumPart, ...] = ()
    launch: At | None = None
    factor: float = 1.0
    is_local: bool = False
