"""Which faults of the catalogue a user means, by number, by class, or by words."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.case.select import PatternError, compile_pattern
from moeverify.case.suggest import find_nearest
from moeverify.errors import CaseError, Problem
from moeverify.faults.fault import Fault, load_faults


def choose_faults(numbers: Sequence[str], pattern: str | None = None) -> list[Fault]:
    """Return the faults with these numbers, or of these classes, whose description matches; all by default.

    Raises: CaseError with every number that is none, or where nothing is left.
    """
    faults = load_faults()
    problems: list[Problem] = []
    chosen: dict[str, Fault] = {}
    for word in numbers or sorted({fault.bug_class for fault in faults.values()}):
        meant = [fault for fault in faults.values() if word.upper() in (fault.number, fault.bug_class)]
        chosen |= {fault.number: fault for fault in meant}
        if not meant:
            problems.append(_describe_unknown(word, list(faults)))
    left = list(chosen.values())
    if pattern is not None:
        try:
            matches = compile_pattern(pattern)
        except PatternError as error:
            problems.append(Problem(f"`{pattern}` cannot be read: {error}", "-k"))
        else:
            left = [fault for fault in left if matches(describe(fault))]
            if not left and not problems:
                message = f"no fault of {len(chosen)} matches `{pattern}`"
                problems.append(Problem(message, "-k", remedy="`moeverify faults list` shows all"))
    if problems:
        raise CaseError(problems)
    return left


def describe(fault: Fault) -> str:
    """Return the line by which a list shows a fault, and that a pattern searches."""
    return f"{fault.number}  {fault.title}  [{fault.source}]"


def _describe_unknown(word: str, numbers: Sequence[str]) -> Problem:
    nearest = find_nearest(word, numbers)
    remedy = f"did you mean `{nearest}`? " if nearest is not None else ""
    return Problem(
        f"no fault `{word}`", remedy=remedy + "`moeverify faults list` shows all, A to O are classes"
    )
