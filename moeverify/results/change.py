"""A part of what something computes, and how it is computed otherwise."""

from __future__ import annotations

from moeverify.results.factor import Factor
from moeverify.results.record import Record


class Change(Record):
    """One part of what a module computes, and the way in which it was computed otherwise.

    `number` and `name` are what the way leaves open: a window, a rank, a factor; a module, a term of a sum. `factor`
    says what a number comes from that something is multiplied by, and `is_summed` that ranks sum over it.
    """

    part: str
    way: str
    number: float | None = None
    name: str = ""
    factor: Factor | None = None
    is_summed: bool = False

    @property
    def place(self) -> str:
        """Return what two changes of one formula may not both be of; of several gradients each is one."""
        return f"{self.part}:{self.name}" if self.part == "gradient-of" else self.part
