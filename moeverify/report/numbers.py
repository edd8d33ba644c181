"""Formatting of numbers, ranks and times, shared by all reports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise


def excess(error: float, bound: float) -> float:
    """Return error / bound; infinite for a NaN, and for a nonzero error with bound 0."""
    if math.isnan(error) or math.isnan(bound):
        return math.inf
    if error == 0.0:
        return 0.0
    if bound <= 0.0 or math.isinf(error):
        return math.inf
    return error / bound


def format_number(value: float) -> str:
    """Return the number to two or three significant digits: `3.1e-15`, `1e-10`, `0.25`, `nan`."""
    if value == 0.0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}" if abs(value) < 1e3 else f"{value:.0f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent):+03d}".replace("e+", "e")


def format_bound(bound: float) -> str:
    """Return a bound as text; `exact` for zero."""
    return "exact" if bound == 0.0 else format_number(bound)


def format_excess(error: float, bound: float) -> str:
    """Return an error in words, relative to its bound."""
    if bound == 0.0:
        return f"{format_number(error)}, and must be bitwise equal"
    if not math.isfinite(error):
        return f"{format_number(error)}, bound {format_number(bound)}"
    times = format_number(excess(error, bound))
    return f"{format_number(error)}, {times} times the bound {format_number(bound)}"


def format_seconds(seconds: float) -> str:
    """Return a duration as text: `3.2 s`, `2 min 05 s`, `1 h 02 min`."""
    if not 99.95 <= seconds < math.inf:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_size(num_bytes: int) -> str:
    """Return a size as text: `3.2 GB`, `17 bytes`."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def format_range(numbers: Iterable[int]) -> str:
    """Return a set of integers in short form: `0-3, 6`, or `0-6 by 2` for four or more equally spaced."""
    ordered = sorted(set(numbers))
    if len(ordered) >= 4:
        step = ordered[1] - ordered[0]
        if step > 1 and all(b - a == step for a, b in pairwise(ordered)):
            return f"{ordered[0]}-{ordered[-1]} by {step}"
    parts: list[str] = []
    start = 0
    for stop in range(1, len(ordered) + 1):
        if stop == len(ordered) or ordered[stop] != ordered[stop - 1] + 1:
            parts.append(_format_run(ordered[start:stop]))
            start = stop
    return ", ".join(parts)


def _format_run(run: Sequence[int]) -> str:
    """Return consecutive integers as `a`, `a, b` or `a-z`."""
    if len(run) <= 2:
        return ", ".join(str(number) for number in run)
    return f"{run[0]}-{run[-1]}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3` or `ranks 0-3, 6`."""
    ordered = sorted(set(ranks))
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {format_range(ordered)}"


def format_count(number: int, noun: str) -> str:
    """Return `1 case`, `3 cases`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
