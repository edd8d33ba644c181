"""Planning: from a trace to a placement, as `moeverify place` does, as data.

Notation: L MoE layers, E experts, R ranks, S slots per rank.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moeverify.errors import CaseError, Problem
from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.cost import Cost, bound_load, measure_cost, measure_steps
from moeverify.tools.placement.heuristic import solve
from moeverify.tools.placement.incremental import improve
from moeverify.tools.placement.load_trace import LoadTrace, TokenLoad, sum_steps
from moeverify.tools.placement.marks import BoolArray, from_marks, mark
from moeverify.tools.placement.moves import Move, list_moves
from moeverify.tools.placement.placement import Placement, check_fit, place_in_blocks
from moeverify.tools.placement.placement_file import placement_to_dict
from moeverify.tools.placement.relabel import move_to_current
from moeverify.tools.placement.sharing import FloatArray, measure_traffic, share_load

MOST_CHOICES = 1 << 24
"""Of a layer, an expert and a rank: 58 layers of 256 experts on 1024 ranks. More need gigabytes and minutes."""


@dataclass(frozen=True)
class Side:
    """One placement, its cost under the whole trace, and its balancedness evaluated per step."""

    placement: Placement
    cost: Cost
    steps: float


@dataclass(frozen=True)
class PlacementPlan:
    """A new placement for a trace, and the current one.

    `bound` (L) is a lower bound on the load of the heaviest rank under any placement. `gain_share` is the
    fraction of the possible gain reached within `max_moves`, None without such a limit.
    """

    trace: LoadTrace = field(repr=False)
    cluster: Cluster
    num_slots: int
    before: Side
    after: Side
    bound: FloatArray = field(repr=False)
    moves: tuple[Move, ...] = field(repr=False)
    seconds: float
    max_moves: int | None = None
    gain_share: float | None = None
    best_moves: int | None = None

    @property
    def gap(self) -> float:
        """Return the excess of the largest loads over their bounds, as a fraction of the bounds."""
        bound = float(self.bound.sum())
        return float(self.after.cost.largest.sum()) / bound - 1.0 if bound > 0 else 0.0

    def count_moves(self) -> Counter[str]:
        """Return how many experts are moved, copied and dropped."""
        return Counter(move.kind for move in self.moves)


def make_plan(
    trace: LoadTrace,
    cluster: Cluster,
    num_slots: int,
    *,
    current: Placement | None = None,
    trace_file: str = "",
    current_file: str = "",
    max_moves: int | None = None,
) -> PlacementPlan:
    """Return a better placement for a trace; the load of a layer's heaviest rank never increases.

    `current` is the placement in use, by default equal blocks. `trace_file` and `current_file` name both in
    messages. With `max_moves`, the fewest experts are sent that reach 95 % of the possible gain, and at most
    `max_moves`.

    Raises: CaseError with all inconsistencies of the inputs.
    """
    header = trace.header
    problems = list(_check(trace, cluster, num_slots, max_moves, trace_file))
    if current is not None:
        problems += _check_current(current, trace, cluster, num_slots, current_file)
    if problems:
        raise CaseError(problems)
    num_slots = min(num_slots, header.num_experts)
    if current is None:
        current = place_in_blocks(header.num_experts, cluster.num_ranks, header.layers)
    current = current.spell_out(header.layers)
    load = sum_steps(trace, cluster)
    started = time.monotonic()
    old = mark(current)
    marks = solve(load, cluster, num_slots)
    if load.is_even:
        # Ranks are interchangeable here: number them so that most experts stay in place.
        marks = move_to_current(marks, old, cluster)
    marks = _keep_better(old, marks, load, cluster)
    gain_share = best_moves = None
    if max_moves is not None:
        improvement = improve(old, marks, load, cluster, num_slots, max_moves=max_moves)
        marks, gain_share = improvement.marks, improvement.gain_share
        best_moves = improvement.best_sends
    seconds = time.monotonic() - started
    placement = from_marks(marks, header.layers, previous=current)
    return PlacementPlan(
        trace,
        cluster,
        num_slots,
        Side(current, measure_cost(old, load, cluster), measure_steps(old, trace, cluster)),
        Side(placement, measure_cost(marks, load, cluster), measure_steps(marks, trace, cluster)),
        bound_load(load, cluster, num_slots),
        list_moves(current, placement, cluster),
        seconds,
        max_moves,
        gain_share,
        best_moves,
    )


def _keep_better(old: BoolArray, new: BoolArray, load: TokenLoad, cluster: Cluster) -> BoolArray:
    """Return the new placement for layers with a smaller largest load or less traffic, else the old."""
    largest = [share_load(marks, load.copies, cluster).sum(1).max(1) for marks in (old, new)]
    traffic = [measure_traffic(marks, load.copies, cluster) for marks in (old, new)]
    is_smaller = largest[1] < largest[0] * (1 - 1e-9)
    sums = [each.off_node * cluster.num_ranks + each.off_rank for each in traffic]
    is_better = is_smaller | ((largest[1] <= largest[0]) & (sums[1] < sums[0] * (1 - 1e-9)))
    return np.where(is_better[:, None, None], new, old)


def collect(*makers: Callable[[], Any]) -> list[Any]:
    """Return the results of all makers, or raise the problems of all of them together.

    Raises: CaseError.
    """
    results, problems = [], []
    for make in makers:
        try:
            results.append(make())
        except CaseError as error:
            problems += error.problems
    if problems:
        raise CaseError(problems)
    return results


def _check(
    trace: LoadTrace, cluster: Cluster, num_slots: int, max_moves: int | None, file: str
) -> Iterator[Problem]:
    """Yield inconsistencies of trace, cluster and limits."""
    num_layers, num_experts = len(trace.header.layers), trace.header.num_experts
    if num_layers * num_experts * cluster.num_ranks > MOST_CHOICES:
        yield Problem(
            f"{num_layers} layers, {num_experts} experts and {cluster.num_ranks} ranks are more than "
            f"{MOST_CHOICES} choices",
            path="ranks",
            remedy="place on fewer ranks, or split the layers of the trace",
        )
    least = -(-num_experts // cluster.num_ranks)
    if num_slots < least:
        yield Problem(
            f"{cluster.num_ranks} ranks with {num_slots} slots each hold {cluster.num_ranks * max(num_slots, 0)} "
            f"experts, the trace has {num_experts}",
            path="slots",
            remedy=f"give at least {least} slots a rank, or more ranks",
        )
    if max_moves is not None and max_moves < 0:
        yield Problem(f"expected at least 0 moves, got {max_moves}", path="max_moves")
    if not trace.copies.any():
        yield Problem("this trace holds no token", file, remedy="record it while experts get tokens")


def _check_current(
    current: Placement, trace: LoadTrace, cluster: Cluster, num_slots: int, file: str
) -> Iterator[Problem]:
    """Yield the ways in which the current placement does not fit the trace, the ranks and their slots."""
    yield from check_fit(
        current,
        num_experts=trace.header.num_experts,
        num_ranks=cluster.num_ranks,
        layers=trace.header.layers,
        file=file,
    )
    if current.num_slots > num_slots:
        yield Problem(
            f"a rank holds {current.num_slots} experts, and there are {num_slots} slots",
            file,
            path="slots",
            remedy=f"give at least {current.num_slots} slots a rank",
        )


def plan_to_dict(plan: PlacementPlan) -> dict[str, Any]:
    """Return a plan as plain data, for JSON."""
    header = plan.trace.header
    result: dict[str, Any] = {
        "format": "moeverify plan",
        "version": 1,
        "trace": {
            "model": header.model,
            "layers": list(header.layers),
            "num_experts": header.num_experts,
            "num_sources": header.num_sources,
            "num_steps": len(plan.trace.steps),
        },
        "num_ranks": plan.cluster.num_ranks,
        "num_nodes": plan.cluster.num_nodes,
        "num_slots": plan.num_slots,
        "before": _side_to_dict(plan.before),
        "after": _side_to_dict(plan.after),
        "bound": plan.bound.tolist(),
        "gap": plan.gap,
        "seconds": plan.seconds,
        "moves": [vars(move) for move in plan.moves],
    }
    if plan.max_moves is not None:
        result |= {
            "max_moves": plan.max_moves,
            "gain_share": plan.gain_share,
            "moves_of_best": plan.best_moves,
        }
    return result


def _side_to_dict(side: Side) -> dict[str, Any]:
    return {
        "balancedness": side.cost.balancedness,
        "balancedness_by_step": side.steps,
        "largest": side.cost.largest.tolist(),
        "mean": side.cost.mean.tolist(),
        "loads": side.cost.loads.tolist(),
        "off_rank": side.cost.off_rank,
        "off_node": side.cost.off_node,
        "num_replicas": side.cost.num_replicas,
        "placement": placement_to_dict(side.placement),
    }
