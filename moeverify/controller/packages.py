"""What a case needs beside moeverify's own dependencies, and whether it is there. No torch."""

from __future__ import annotations

import importlib.util

from moeverify.case.schema import Case

_MEGABLOCKS = ("megablocks", "stk", "triton")


def find_obstacle(case: Case, device: str) -> str:
    """Return why this case cannot run here although the machine is large enough, or nothing."""
    if device == "cpu" and case.layout.cp > 1 and case.layout.context_parallel == "torch":
        return "torch's context_parallel has no kernel for the CPU"
    if case.layout.experts != "megablocks":
        return ""
    missing = [name for name in _MEGABLOCKS if importlib.util.find_spec(name) is None]
    if missing:
        return (
            f"needs megablocks, and {' and '.join(missing)} cannot be imported; `make megablocks` installs it"
        )
    if device == "cuda" and case.recipe.precision == "float64":
        return (
            "megablocks' compiled kernels copy rows in float32; only interpreted, on a CPU, they take float64"
        )
    return ""
