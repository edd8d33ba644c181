"""Lines that define Python values, and which of them are evidence: they make a wrong value of right ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moeverify.explain.program import Site
from moeverify.explain.python_values import Difference


@dataclass(eq=False)
class DefiningLine:
    """A line that defines a value, for lines of the `users`. With `passes`, it only passes a name or attribute on.

    With `asks_layout`, it asks a mesh or group for a size or rank, which differs in a right layout, too.
    `has_known` says that an operand equals one device's, `is_evidence` that the value differs although it need not,
    unlike sizes of tensors and meshes, and `is_passed` that such an operand explains it.
    """

    site: Site
    difference: Difference | None
    passes: bool = False
    asks_layout: bool = False
    users: list[DefiningLine] = field(default_factory=list)
    has_known: bool = False
    is_evidence: bool = False
    is_passed: bool = False

    @property
    def is_new(self) -> bool:
        """Return whether one device does not run the line, and runs others of the function."""
        return self.difference is not None and self.difference.there is None

    @property
    def is_made(self) -> bool:
        """Return whether the line makes a wrong value, of known operands or none."""
        if self.difference is None or (self.asks_layout and self.difference.is_integer):
            return False
        is_integer = self.difference.is_integer
        # One of several definitions of a name may be equal, such as the first value of a product in a loop.
        has_known = self.has_known and not (self.passes and is_integer)
        return self.is_new or has_known or not (self.passes or is_integer)


def find_evidence(found: Sequence[DefiningLine]) -> None:
    """Mark the lines whose values differ although they need not, and those to which such a value is passed."""
    waiting = [each for each in found if each.is_made]
    for each in waiting:
        each.is_evidence = True
    while waiting:
        for user in waiting.pop().users:
            user.is_passed = True
            if not user.is_evidence:
                user.is_evidence = True
                waiting.append(user)
