"""A change of one part of a loss formula."""

from __future__ import annotations

from moeverify.results.record import Record


class Change(Record):
    """A change of one part of a loss formula: the part, and the way in which it is computed instead."""

    part: str
    way: str
