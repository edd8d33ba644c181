"""Edit: an executable change of the ranks' operators at one place of the program."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from moeverify.explain.counterparts import Place
from moeverify.explain.joint import At, Changes
from moeverify.explain.program import Op

Kind = Literal[
    "number",
    "operator",
    "operand",
    "total",
    "share",
    "whole",
    "removed",
    "inserted",
    "returned",
    "scale",
    "group",
    "unreduced",
    "dtype",
    "value",
    "created",
    "block",
    "owned",
]
"""The kinds of edits.

An edit changes options or the operator. It replaces an operand by another value, the total of a sum, its share of a
value that counts once, or a whole tensor. It removes or inserts an operator, replaces the output of a module or the
result, divides an operand by its factor, gives a collective another group, reduces over ranks or widens a dtype. It
replaces elements of an operand where they are created, gives ranks other blocks of parameters, or parts of a
sum the elements that they own.
"""


SUBSTITUTIONS = frozenset({"operand", "whole", "value"})
"""Kinds of edits that insert single-device values."""

TOTALS = frozenset({"total", "unreduced"})
"""Kinds of edits that replace a part of a sum by the total of several ranks."""

Key = tuple[Hashable, ...]
"""Identity of an edit."""

Keys = frozenset[Key]
"""Edits that were made together."""


@dataclass(frozen=True)
class Edit:
    """A change of the operators `ops` of all ranks at one place of the program.

    `others` maps each operator to its single-device counterpart. `place` is the place of the replaced argument,
    or has the names of the replaced parameters.
    `numbers` has pairs of numbers of the first operator: (before, after). `path` passes created elements on.
    """

    kind: Kind
    ops: tuple[At, ...]
    changes: Changes
    others: Mapping[At, Op] = field(default_factory=dict)
    place: Place = ()
    numbers: tuple[tuple[str, str], ...] = ()
    path: tuple[At, ...] = ()

    @property
    def other(self) -> Op | None:
        """The single-device counterpart of the first operator, or None."""
        return self.others.get(self.ops[0])

    @property
    def key(self) -> Key:
        """Identity of the edit among those of one search, also if it was computed again in another state."""
        others = tuple(op.number for _, op in sorted(self.others.items()))
        return self.kind, self.ops, self.place, others, self.numbers, tuple(sorted(self.changes.values))
