"""Injects a fault on this rank for as long as a block lasts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moeverify.errors import CaseError, Problem
from moeverify.faults.assignments import assignments_undone
from moeverify.faults.mutation.apply import mutated
from moeverify.faults.mutation.mutant import PREFIX, find_mutant
from moeverify.faults.patch import Patch
from moeverify.train.target import resolve

OPTION = "--fault"


@contextmanager
def injected(target: str | None) -> Iterator[None]:
    """Call the fault that `package.module:function` names, and undo it when the block ends; do nothing for None.

    A target that begins with `mutant:` names a mutant (`moeverify.faults.mutation.mutant`).

    A function of one argument is given a `Patch`. One of none assigns to modules and classes itself; what it has
    assigned is found and put back.
    """
    if target is None:
        yield
        return
    if target.startswith(PREFIX):
        with mutated(find_mutant(target)):
            yield
        return
    inject = find_fault(target)
    if _count_required(inject):
        with Patch() as patch:
            inject(patch)
            yield
    else:
        with assignments_undone(inject):
            yield


def check_fault(target: str) -> None:
    """Raise CaseError where a fault or a mutant of that name cannot be injected."""
    if target.startswith(PREFIX):
        find_mutant(target)
    else:
        find_fault(target)


def find_fault(target: str) -> Callable[..., object]:
    """Return the function that a fault's name means.

    Raises: CaseError where there is none, or where it wants more than a patch.
    """
    function = resolve(target, OPTION)
    if _count_required(function) > 1:
        message = f"`{target}` wants {_count_required(function)} arguments"
        remedy = "a fault takes a `moeverify.faults.patch.Patch`, or nothing"
        raise CaseError([Problem(message, path=OPTION, remedy=remedy)])
    return function


def _count_required(function: Callable[..., Any]) -> int:
    """Return how many arguments without a default a function has; 0 where Python does not know."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return 0
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(each.default is each.empty and each.kind not in variable for each in parameters)
