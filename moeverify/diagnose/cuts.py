"""Modules inside of a mixture of experts in which the way back is cut, where their rows themselves are not read.

What the dispatcher gets back for its tokens comes through the experts. Where it is zero, it may be cut on the way to
them, in them, or behind them. It is in a module that gets a gradient and passes none back, or that returns what has
no graph, although it was given what has one and its own parameters get nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moeverify.diagnose.rank_readings import RankReadings


def find_cuts(by_rank: Sequence[RankReadings], wrong: Collection[str]) -> frozenset[str]:
    """Return the modules in which ranks cut the graph; `wrong` are the parameters whose gradients are wrong."""
    modules = {module for read in by_rank for module, end in read.reached if end == "input"}
    cut = {module for module in modules if _is_cut(module, by_rank, wrong)}
    # What calls a module that is cut passes nothing back either.
    return frozenset(module for module in cut if not any(other.startswith(f"{module}.") for other in cut))


def _is_cut(module: str, by_rank: Sequence[RankReadings], wrong: Collection[str]) -> bool:
    has_wrong = any(name.startswith(f"{module}.") for name in wrong)
    found = []
    for read in by_rank:
        if (module, "input") not in read.reached:
            continue  # a rank without tokens for it
        comes_in = read.reached.get((module, "output"), has_wrong)
        found.append(comes_in and not read.reached[module, "input"])
    return bool(found) and all(found)
