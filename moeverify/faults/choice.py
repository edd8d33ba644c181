"""Selection of faults of the catalogue by number, class or words."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.cases.select import read_pattern
from moeverify.cases.suggest import find_nearest
from moeverify.errors import CaseError, Problem
from moeverify.faults.catalogue import FaultClass, load_classes, load_faults
from moeverify.faults.fault import Fault


def choose_faults(words: Sequence[str], pattern: str | None = None) -> list[Fault]:
    """Return the faults with these numbers or classes whose description matches; all by default.

    A class is given by its name or letter. `pattern` is matched against `describe`.

    Raises: CaseError with every unknown word, or when no fault is left.
    """
    classes = load_classes()
    problems: list[Problem] = []
    chosen: dict[str, Fault] = {}
    for word in words or [each.name for each in classes]:
        found = [fault for each in classes for fault in each.faults if _is_meant(word, each, fault)]
        chosen |= {fault.number: fault for fault in found}
        if not found:
            problems.append(_describe_unknown(word, classes))
    left: list[Fault] = []
    try:
        matches = read_pattern(pattern)
    except CaseError as error:
        problems += error.problems
    else:
        left = [fault for fault in chosen.values() if matches(describe(fault))]
        if not left and not problems:
            message = f"no fault of {len(chosen)} matches `{pattern}`"
            problems.append(Problem(message, path="-k", remedy="`moeverify faults list` shows all"))
    if problems:
        raise CaseError(problems)
    return left


def find_target(number: str) -> str:
    """Return the function that injects the fault with this number.

    Raises: CaseError if there is none.
    """
    found = load_faults().get(number.upper())
    if found is None:
        remedy = "write `package.module:function`, or a number of `moeverify faults list`"
        raise CaseError([Problem(f"`{number}` is no function, and no fault", path="--fault", remedy=remedy)])
    return found.target


def find_class(fault: Fault) -> FaultClass:
    """Return the class of a fault."""
    return next(each for each in load_classes() if each.letter == fault.bug_class)


def describe(fault: Fault) -> str:
    """Return the line that lists a fault and that patterns search."""
    width = max(len(each.name) for each in load_classes())
    return f"{fault.number}  {find_class(fault).name:{width}}  {fault.title}  [{fault.source}]"


def _is_meant(word: str, of_class: FaultClass, fault: Fault) -> bool:
    return word.upper() in (fault.number, of_class.letter, of_class.name.upper())


def _describe_unknown(word: str, classes: Sequence[FaultClass]) -> Problem:
    names = [each.name for each in classes]
    nearest = find_nearest(word, [*names, *(fault.number for each in classes for fault in each.faults)])
    remedy = f"did you mean `{nearest}`? " if nearest is not None else ""
    return Problem(
        f"no fault `{word}`",
        remedy=remedy + f"`moeverify faults list` shows all; classes: {', '.join(names)}",
    )
