"""Modules in a mixture of experts that cut the backward graph, found without readings of their rows.

The dispatcher's token gradient passes through the experts. If it is zero, the graph may be cut before, in
or after them. The cut is in a module that receives a gradient and passes none back. It may also be in a
module whose input has a graph but whose output has none, and whose own parameters get no gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moeverify.explain.fitting.rank_readings import RankReadings


def find_cuts(by_rank: Sequence[RankReadings], wrong: Collection[str]) -> frozenset[str]:
    """Return the modules in which ranks cut the graph; `wrong` names the parameters with wrong gradients."""
    modules = {module for read in by_rank for module, end in read.reached if end == "input"}
    cut = {module for module in modules if _is_cut(module, by_rank, wrong)}
    # A caller of a cut module passes nothing back either.
    return frozenset(module for module in cut if not any(other.startswith(f"{module}.") for other in cut))


def _is_cut(module: str, by_rank: Sequence[RankReadings], wrong: Collection[str]) -> bool:
    has_wrong = any(name.startswith(f"{module}.") for name in wrong)
    found = []
    for read in by_rank:
        if (module, "input") not in read.reached:
            continue  # this rank has no tokens for the module
        comes_in = read.reached.get((module, "output"), has_wrong)
        found.append(comes_in and not read.reached[module, "input"])
    return bool(found) and all(found)
