"""New placements at a fixed interval of steps, solved from the load of the steps so far.

Notation: T steps, L MoE layers, E experts, R source ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.load_trace import LoadTrace, TraceHeader
from moeverify.tools.placement.placement import Placement
from moeverify.tools.placement.plan import make_plan

Copies = npt.NDArray[np.int64]
"""Token copies (T, L, E, R)."""


@dataclass(frozen=True)
class Policy:
    """When to compute new placements, and from which steps: see `moeverify.cases.schema.Rebalance`."""

    every: int
    slots: int
    last: int | None = None
    max_moves: int | None = None

    def solve(self, copies: Copies, current: Placement) -> Placement:
        """Return the placement after the steps of `copies`; the current one if no expert received a token.

        Only the heuristic is used: it takes milliseconds, and its result depends only on the load.
        """
        copies = copies if self.last is None else copies[-self.last :]
        if not copies.any():
            return current
        header = TraceHeader(current.layers, current.num_experts, num_sources=current.num_ranks)
        trace = LoadTrace(header, tuple(range(len(copies))), copies)
        cluster = Cluster(current.num_ranks)
        plan = make_plan(trace, cluster, self.slots, current=current, max_moves=self.max_moves)
        return plan.after.placement


def list_solved(copies: Copies, first: Placement, policy: Policy) -> dict[int, Placement]:
    """Return the placements of a run with this load, by the number of completed steps.

    There is none after the last step.
    """
    found: dict[int, Placement] = {}
    current = first
    for after in range(policy.every, len(copies), policy.every):
        current = found[after] = policy.solve(copies[:after], current)
    return found
