"""The expected finding of a known fault, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeverify.report.words.factor import name_sources
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

_SHARES: Mapping[str, str] = {
    "data_rank": "the shares of data ranks",
    "context_rank": "the shares of cp ranks",
    "micro_batch": "the shares of micro-batches",
}


def describe_expected(places: Sequence[At], causes: Sequence[Cause]) -> str:
    """Return the expected cause and place in words: `scale at *.moe.experts* or axis tp`."""
    return f"{' or '.join(causes)} at {' or '.join(map(describe_place, places))}"


def describe_place(place: At) -> str:
    """Return one accepted place in words: `*.moe.experts*, axis tp`."""
    words = [
        place.name,
        name_sources([place.axis]) if place.axis else "",
        f"{place.term} loss" if place.term else "",
    ]
    words += [place.stage.value if place.stage is not None else "", _SHARES.get(place.share, "")]
    return ", ".join(filter(None, words)) or "any place"
