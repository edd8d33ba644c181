"""Seams: functions and methods of the code under test that faults wrap.

The decorator does not change behaviour. It tells readers that faults import the function by its name and
depend on its arguments (tests/unit/faults). It also shows where a new fault can be injected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

SEAMS: dict[str, Callable[..., Any]] = {}
"""All seams of the modules imported so far, by `module.qualified_name`."""


def seam(function: F) -> F:
    """Register a function or method as a seam and return it unchanged."""
    SEAMS[f"{function.__module__}.{function.__qualname__}"] = function
    return function
