"""A page for each code in JSON: causes of findings, and mechanisms of culprits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moeverify.report.words.mechanism import MECHANISMS
from moeverify.results.cause import Cause

_MOST_EXAMPLES = 5


def describe_code(code: str, list_examples: Callable[[str], Sequence[tuple[str, str]]]) -> str:
    """Return the page of a code, with known bugs as (number, title); empty if it is no code."""
    lines = []
    if code in set(Cause):
        lines.append(f"{code}: {Cause(code).description}.")
    for mechanism, meaning in MECHANISMS.items():
        if code == mechanism:
            lines.append(f"{code}, of the first wrong operation: {meaning}.")
    examples = list_examples(code) if lines else ()  # only a code is worth the import of all bugs
    if examples:
        lines += ["", "Known bugs that have it:"]
        lines += [f"  {number}  {title}" for number, title in examples[:_MOST_EXAMPLES]]
        lines += ["", f"next: moeverify faults run {examples[0][0]} injects the first"]
    return "\n".join(lines)
