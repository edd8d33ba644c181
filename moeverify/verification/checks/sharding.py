"""Check that the layout takes effect: each axis shards some of its tensors in each of its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeverify.cases.axes.claims import Claim, axis_claims
from moeverify.cases.axes.mesh import MeshPlan
from moeverify.parallel.regions.observer import INITIAL
from moeverify.results.checks import CheckName
from moeverify.results.facts import AxisUses, ShardingFacts
from moeverify.results.finding import Finding
from moeverify.train.program import Program
from moeverify.verification.checks.axis_use import Issued, count_issued, find_unused, list_uses
from moeverify.verification.checks.base import Check, Outcome, RankRun, Role, Shown, Watch, make_outcome
from moeverify.verification.checks.placed import find_misplaced
from moeverify.verification.checks.staged import find_elsewhere
from moeverify.verification.collectives.trace import CollectiveTrace
from moeverify.verification.compare.assembled import Key

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
    (`moeverify.verification.checks.axis_use`).
    """

    name = CheckName.SHARDING
    role = Role.ORIGIN

    def watch(self, run: RankRun, program: Program) -> Watch[Issued] | None:
        """Return a watch that counts collectives, under a user's own `parallelize`; see `Check`."""
        return _StepCollectives(run.trace) if run.case.layout.parallelize is not None else None

    def judge(self, shown: Shown, reports: Sequence[Issued]) -> Outcome | None:
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


def judge_claims(shown: Shown, claims: Mapping[str, Claim]) -> Outcome:
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
