"""Seams: the functions and methods of the code under test that faults wrap.

The mark changes nothing: a seam runs as it would without it. It says to who changes the function that faults import
it by its name and are held to its arguments (tests/unit/faults), and to who writes a fault where to begin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

SEAMS: dict[str, Callable[..., Any]] = {}
"""All seams of the modules imported so far, by `module.qualified_name`."""


def seam(function: F) -> F:
    """Mark a function or method as a seam and return it as it is."""
    SEAMS[f"{function.__module__}.{function.__qualname__}"] = function
    return function
