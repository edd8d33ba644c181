"""The collectives that a rank issued inside a module, in words."""

from __future__ import annotations

from moeverify.report.words.check import list_issues
from moeverify.report.words.subject import MODEL
from moeverify.results.collective import IssuedCollective
from moeverify.results.facts import CollectiveFacts, Facts
from moeverify.results.place import Place


def describe_issued(place: Place, facts: Facts | None = None) -> tuple[str, ...]:
    """Return one line per kind of collective issued in the place's module, or the nearest enclosing one.

    If ranks disagree on a collective, `facts` determine the lines: one per group of ranks.
    """
    if isinstance(facts, CollectiveFacts):
        return list_issues(facts)
    if place.issued is None:
        return place.collectives  # from a file of an older version
    if not place.issued:
        return ("none in this module, nor in one around it",)
    where = "" if place.issued_in == place.module else f"in {place.issued_in or MODEL}, "
    return tuple(where + describe_collective(collective) for collective in place.issued)


def describe_collective(collective: IssuedCollective) -> str:
    """Return direction, operation, group, dtype and shape, count, and call site."""
    group = ",".join(map(str, collective.group))
    shape = list(collective.shapes[0]) if len(collective.shapes) == 1 else " of several shapes"
    what = f" on {collective.dtype}{shape}" if collective.shapes else ""
    times = f", {collective.times} times" if collective.times > 1 else ""
    site = f", called at {collective.site}" if collective.site else ""
    return f"{collective.direction}: {collective.op} over {collective.axis} ({group}){what}{times}{site}"
