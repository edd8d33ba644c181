"""What a user's own code does with the mesh axes: which parameters it divides, and what it sends over them.

moeverify divides rows and positions by itself, so neither says that `parallelize` has done anything. An axis is in
use if in each of its groups some parameter is divided, or a collective ran in a training step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from moeverify.axes.mesh import MeshPlan
from moeverify.checks.base import Shown
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import AxisUse, ShardingFacts
from moeverify.results.finding import Finding
from moeverify.results.trace import CollectiveRecord

Issued = Mapping[tuple[str, tuple[int, ...]], int]
"""How many collectives a rank has issued, by operation and global ranks of the group."""

# The sums of losses and norms, and what completes gradients: moeverify's own, whatever `parallelize` has done.
_OWN = (
    "moeverify/parallel/collectives.py:",
    "moeverify/parallel/gradients.py:",
    "moeverify/train/clipping.py:",
)


def count_issued(records: Sequence[CollectiveRecord]) -> Issued:
    """Return the collectives of the user's code among records of a training step."""
    return Counter(
        (record.op, record.group)
        for record in records
        if len(record.group) > 1 and not any(own in record.site for own in _OWN)
    )


def list_uses(shown: Shown, reports: Sequence[Issued]) -> tuple[AxisUse, ...]:
    """Return what each axis of more than one rank is used for."""
    plan = MeshPlan.of(shown.case.layout)
    regions = [
        tensor.list_regions() for (_, kind, _), tensor in shown.tensors.items() if kind == Kind.INITIAL_WEIGHT
    ]
    uses = []
    for axis, size in plan.data.axes.items():
        if size == 1:
            continue
        groups = plan.data.groups(axis)
        issued = [_count_between(group, reports) for group in groups]
        collectives = issued[0] if all(issued) else Counter()
        divided = [sum(_is_divided(region, group) for region in regions) for group in groups]
        uses.append(
            AxisUse(
                axis=axis,
                num_divided=min(divided),
                num_parameters=len(regions),
                collectives=dict(collectives),
            )
        )
    return tuple(uses)


def find_unused(shown: Shown, uses: Sequence[AxisUse]) -> list[Finding]:
    """Return a finding for each axis that nothing uses and that the case does not declare."""
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
    """Return whether ranks of a group hold different regions of a parameter, or only some of them hold it."""
    return len({regions.get(rank) for rank in group}) > 1


def _count_between(group: Sequence[int], reports: Sequence[Issued]) -> Counter[str]:
    """Return by operation how many collectives ran between ranks of a group, as its first rank has issued them."""
    found: Counter[str] = Counter()
    for (op, ranks), number in reports[group[0]].items() if reports else ():
        if len(set(ranks) & set(group)) > 1:
            found[op] += number
    return found
