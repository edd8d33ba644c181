"""Use of the mesh axes by the user's own code: which parameters it shards, which collectives it runs.

moeverify itself splits rows and positions, so a split batch does not prove that `parallelize` did anything.
An axis is in use if, in each of its groups, some parameter is sharded or a collective ran in a training
step.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from moeverify.cases.axes.mesh import MeshPlan
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import AxisUse, ShardingFacts
from moeverify.results.finding import Finding
from moeverify.results.trace import CollectiveRecord
from moeverify.verification.checks.base import Shown

Issued = Mapping[tuple[str, tuple[int, ...]], int]
"""Number of collectives that a rank issued, by operation and global ranks of the group."""

# Call sites of moeverify's own collectives: sums of losses and norms, and gradient reductions. They run
# whether or not `parallelize` does anything.
_OWN = (
    "moeverify/parallel/collectives.py:",
    "moeverify/parallel/gradients.py:",
    "moeverify/train/clipping.py:",
)


def count_issued(records: Sequence[CollectiveRecord]) -> Issued:
    """Count the collectives that the user's code issued, among the records of a training step."""
    return Counter(
        (record.op, record.group)
        for record in records
        if len(record.group) > 1 and not any(own in record.site for own in _OWN)
    )


def list_uses(shown: Shown, reports: Sequence[Issued]) -> tuple[AxisUse, ...]:
    """Return the use of each axis with more than one rank."""
    plan = MeshPlan.of(shown.case.layout)
    weights = [tensor for (_, kind, _), tensor in shown.tensors.items() if kind == Kind.INITIAL_WEIGHT]
    regions = [tensor.list_regions() for tensor in weights]
    sizes = [math.prod(tensor.shards[0][1].shape) for tensor in weights]
    uses = []
    for axis, size in plan.data.axes.items():
        if size == 1:
            continue
        groups = plan.data.groups(axis)
        issued = [_count_between(group, reports) for group in groups]
        collectives = issued[0] if all(issued) else Counter()
        divided = [[_is_divided(region, group) for region in regions] for group in groups]
        uses.append(
            AxisUse(
                axis=axis,
                num_divided=min(map(sum, divided)),
                num_parameters=len(regions),
                share=min(sum(itertools.compress(sizes, chosen)) for chosen in divided) / max(sum(sizes), 1),
                collectives=dict(collectives),
            )
        )
    return tuple(uses)


def find_unused(shown: Shown, uses: Sequence[AxisUse]) -> list[Finding]:
    """Return a finding for each unused axis that the case does not list in `allow_replicated`."""
    plan = MeshPlan.of(shown.case.layout)
    return [
        Finding(
            check=CheckName.SHARDING,
            kind=Kind.INITIAL_WEIGHT,
            tensor=f"axis {use.axis}",
            step=-1,
            rank=0,
            error=1.0,
            bound=0.0,
            ranks=tuple(range(plan.world_size)),
            facts=ShardingFacts(axis=use.axis, is_unused=True),
        )
        for use in uses
        if not use.is_used and use.axis not in shown.case.checks.allow_replicated
    ]


def _is_divided(regions: Mapping[int, frozenset[str]], group: Sequence[int]) -> bool:
    """Return whether the ranks of a group hold different regions of a parameter, or only some hold it."""
    return len({regions.get(rank) for rank in group}) > 1


def _count_between(group: Sequence[int], reports: Sequence[Issued]) -> Counter[str]:
    """Count the collectives between ranks of a group by operation, as recorded by the group's first rank."""
    found: Counter[str] = Counter()
    for (op, ranks), number in reports[group[0]].items() if reports else ():
        if len(set(ranks) & set(group)) > 1:
            found[op] += number
    return found
