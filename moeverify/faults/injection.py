"""Injection of a fault on this rank, for the duration of a block."""

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
    """Call the fault `package.module:function`, and undo it when the block ends; do nothing for None.

    A target with the prefix `mutant:` names a mutant (`moeverify.faults.mutation.mutant`). A function with
    one argument gets a `Patch`. A function without arguments assigns to modules and classes itself; its
    assignments are detected and undone.

    Raises: CaseError when the fault or mutant does not exist.
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
    """Check that a fault or mutant of that name can be injected.

    Raises: CaseError when it cannot.
    """
    if target.startswith(PREFIX):
        find_mutant(target)
    else:
        find_fault(target)


def find_fault(target: str) -> Callable[..., object]:
    """Return the function of a fault's name.

    Raises: CaseError when there is none, or when it requires more than a patch.
    """
    function = resolve(target, OPTION)
    if _count_required(function) > 1:
        message = f"`{target}` wants {_count_required(function)} arguments"
        remedy = "a fault takes a `moeverify.faults.patch.Patch`, or nothing"
        raise CaseError([Problem(message, path=OPTION, remedy=remedy)])
    return function


def _count_required(function: Callable[..., Any]) -> int:
    """Return the number of required arguments of a function; 0 if its signature is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return 0
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(each.default is each.empty and each.kind not in variable for each in parameters)
