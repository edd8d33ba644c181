"""A part of what a loss is made of, and how it is made otherwise."""

from __future__ import annotations

from moeverify.results.record import Record


class Change(Record):
    """One part of what a loss is made of, and the way in which it was made otherwise.

    `number` and `name` are what the way leaves open: a factor, a number of positions; a term of a sum.
    """

    part: str
    way: str
    number: float | None = None
    name: str = ""

    @property
    def place(self) -> str:
        """Return what two changes of one formula may not both be of; of several gradients each is one."""
        return f"{self.part}:{self.name}" if self.part == "gradient-of" else self.part
