"""Check that the layout takes effect: each axis shards some of its tensors in each of its groups.

moeverify itself splits rows and positions, so a split batch does not prove that a user's `parallelize` did
anything. With one, an axis is in use if, in each of its groups, some parameter is sharded or a collective
ran in a training step.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from moeverify.cases.axes.claims import Claim, axis_claims
from moeverify.cases.axes.mesh import MeshPlan
from moeverify.parallel.regions.observer import INITIAL
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import AxisUse, AxisUses, ShardingFacts
from moeverify.results.finding import Finding
from moeverify.results.trace import CollectiveRecord
from moeverify.train.program import TrainingProgram
from moeverify.verification.checks.base import (
    Check,
    CheckOutcome,
    RankRun,
    Role,
    ShownTensors,
    Watch,
    make_outcome,
)
from moeverify.verification.checks.placed import find_elsewhere, find_misplaced
from moeverify.verification.collectives.trace import CollectiveTrace
from moeverify.verification.compare.assembled import Key

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


def list_uses(shown: ShownTensors, reports: Sequence[Issued]) -> tuple[AxisUse, ...]:
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


def find_unused(shown: ShownTensors, uses: Sequence[AxisUse]) -> list[Finding]:
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


Regions = Mapping[int, frozenset[str]]


class _StepCollectives(Watch[Issued]):
    """Counts the collectives of the training steps of the first run, excluding the model's setup."""

    def __init__(self, trace: CollectiveTrace) -> None:
        self._trace = trace
        self._before: int | None = None
        self._issued: Issued = {}

    def begin_step(self, step: int) -> None:
        """Start counting at the first step."""
        if self._before is None:
            self._before = self._trace.num_collectives

    def close(self) -> None:
        """Keep the count, since later runs continue the same trace."""
        if self._before is not None:
            self._issued = count_issued(self._trace.since(self._before))

    def report(self) -> Issued:
        """Return the collectives that this rank issued."""
        return self._issued


class Sharding(Check[Issued]):
    """Tensors that each axis claims to shard, against the regions that the ranks of its groups hold.

    A layout that silently replicates everything would pass every other check. A group without any such
    tensor, such as a pipeline stage without experts, is skipped if another group holds one. A user's own
    `parallelize` makes no claims; there every axis must be used for something
    (`moeverify.verification.checks.sharding`).
    """

    name = CheckName.SHARDING
    role = Role.ORIGIN

    def watch(self, run: RankRun, program: TrainingProgram) -> Watch[Issued] | None:
        """Return a watch that counts collectives, under a user's own `parallelize`; see `Check`."""
        return _StepCollectives(run.trace) if run.case.layout.parallelize is not None else None

    def judge(self, shown: ShownTensors, reports: Sequence[Issued]) -> CheckOutcome | None:
        """Return the verdict, with a finding for each axis without effect; see `Check`."""
        if all(step != INITIAL for step, _, _ in shown.tensors):
            return None  # a run that starts with a load does not show its initial state
        claims = axis_claims(shown.case, MeshPlan.of(shown.case.layout))
        outcome = judge_claims(shown, claims)
        misplaced = [*find_elsewhere(shown), *find_misplaced(shown)]
        if misplaced:
            outcome = make_outcome(CheckName.SHARDING, [*outcome.findings, *misplaced], len(claims))
        if shown.case.layout.parallelize is None or not reports:
            return outcome
        uses = list_uses(shown, reports)
        findings = (*outcome.findings, *find_unused(shown, uses))
        num_axes = len({*claims, *(use.axis for use in uses)})
        return make_outcome(CheckName.SHARDING, findings, num_axes, facts=AxisUses(axes=uses))


def judge_claims(shown: ShownTensors, claims: Mapping[str, Claim]) -> CheckOutcome:
    """Return whether each axis shards the tensors it claims, in each of its groups."""
    findings: list[Finding] = []
    for axis, claim in claims.items():
        covered = {key: tensor.list_regions() for key, tensor in shown.tensors.items() if claim.covers(key)}
        regions = list(covered.values())
        seen = [
            (group, present)
            for group in claim.groups
            if (present := [region for region in regions if any(rank in region for rank in group)])
        ]
        undivided = [
            group for group, present in seen if not any(_differs(region, group) for region in present)
        ]
        whole = [] if undivided or not seen else _list_whole(covered, claim)
        if seen and not undivided and not whole:
            continue
        if whole:
            undivided = list(claim.groups)
        group = undivided[0] if undivided else claim.groups[0]
        findings.append(
            Finding(
                check=CheckName.SHARDING,
                kind=claim.kind,
                tensor=f"axis {axis}",
                step=-1,
                rank=group[0],
                error=1.0,
                bound=0.0,
                ranks=tuple(sorted({rank for found in undivided for rank in found})),
                facts=ShardingFacts(
                    axis=axis, part=claim.part, modules=tuple(whole), is_repeated=claim.once and bool(whole)
                ),
            )
        )
    return make_outcome(CheckName.SHARDING, findings, len(claims))


def _list_whole(covered: Mapping[Key, Regions], claim: Claim) -> list[str]:
    """Return the modules that some group should shard but holds whole.

    For a claim of `once` (each tensor on one rank of a group), these are modules with a tensor on several
    ranks.
    """
    by_module: dict[str, list[Regions]] = {}
    for (_, _, name), regions in covered.items():
        module = claim.find_module(name)
        if module is not None:
            by_module.setdefault(module, []).append(regions)
    return [
        module
        for module, regions in by_module.items()
        if any(
            _is_whole([each for each in regions if any(rank in each for rank in group)], group, claim)
            for group in claim.groups
        )
    ]


def _is_whole(present: Sequence[Regions], group: Sequence[int], claim: Claim) -> bool:
    if claim.once:
        return any(sum(rank in each for rank in group) > 1 for each in present)
    return bool(present) and not any(_differs(each, group) for each in present)


def _differs(regions: Regions, group: Sequence[int]) -> bool:
    return len({regions.get(rank) for rank in group}) > 1


CHECKS = (Sharding(),)
