"""A part of what a loss is made of, and how it is made otherwise."""

from __future__ import annotations

from moeverify.results.record import Record


class Change(Record):
    """One part of what a loss is made of, and the way in which it was made otherwise."""

    part: str
    way: str
