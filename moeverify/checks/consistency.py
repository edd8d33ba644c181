"""Checks of a run against itself and its layout: replicas, coverage, sharding, repetition."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from moeverify.axes.claims import Claim
from moeverify.compare.judging import Assembled, Coordinates, Judgement, Key
from moeverify.results.checks import COVERAGE, REPEAT, REPLICAS, SHARDING
from moeverify.results.finding import CheckResult, Finding, Worst

_PARTS = {"experts": "experts", "others": "what is no expert"}


def judge_replicas(assembled: Mapping[Key, Assembled], coordinates: Coordinates) -> Judgement:
    """Return whether ranks that hold the same region of a logical tensor hold the same bits."""
    findings: list[Finding] = []
    num_compared = 0
    for key, tensor in assembled.items():
        by_region: dict[str, dict[int, list[int]]] = {}
        for rank, entry in tensor.pieces:
            if entry.difference.count:
                by_region.setdefault(entry.region, {}).setdefault(entry.bits, []).append(rank)
        groups = [group for group in by_region.values() if sum(map(len, group.values())) > 1]
        num_compared += bool(groups)
        differing = next((group for group in groups if len(group) > 1), None)
        if differing is not None:
            findings.append(_replica_finding(key, tensor, differing, coordinates))
    return _judgement(REPLICAS, num_compared, findings)


def _replica_finding(
    key: Key, tensor: Assembled, group: Mapping[int, Sequence[int]], coordinates: Coordinates
) -> Finding:
    step, kind, name = key
    entries = dict(tensor.pieces)
    ranks = sorted(group.values(), key=len, reverse=True)
    odd = max((rank for part in ranks for rank in part), key=lambda rank: entries[rank].difference.sum_error2)
    entry = entries[odd]
    parts = " | ".join(", ".join(map(str, part)) for part in ranks)
    differing_axes = _axes_between(ranks, coordinates)
    where = f"replicas over {differing_axes}" if differing_axes else ""
    return Finding(
        check=REPLICAS,
        tensor=name,
        step=step,
        rank=odd,
        ranks=tuple(rank for part in ranks for rank in part),
        coordinates=dict(coordinates.get(odd, {})),
        error=entry.difference.relative_error,
        bound=0.0,
        index=entry.index,
        expected=entry.difference.expected_at,
        actual=entry.difference.actual_at,
        where=where,
        evidence=(f"{kind}: ranks with equal bits: {parts}",),
    )


def _axes_between(groups: Sequence[Sequence[int]], coordinates: Coordinates) -> str:
    """Return the axes on which the ranks of different groups differ while those of one group agree."""
    axes = list(coordinates.get(groups[0][0], {}))
    found = [
        axis
        for axis in axes
        if all(len({coordinates[rank][axis] for rank in group}) == 1 for group in groups)
        and len({coordinates[group[0]][axis] for group in groups}) > 1
    ]
    return ", ".join(found)


def judge_coverage(
    assembled: Mapping[Key, Assembled], golden_keys: Mapping[int, set[tuple[str, str]]]
) -> Judgement:
    """Return whether the ranks together hold every element of every logical tensor of the golden.

    `golden_keys` has, for each step, the (kind, name) that the golden holds and the run must show.
    """
    findings: list[Finding] = []
    for key, tensor in assembled.items():
        held = sum(entry.difference.count for _, entry in tensor.distinct.values())
        wanted = math.prod(tensor.pieces[0][1].shape)
        if held != wanted:
            message = f"{key[1]}: the ranks hold {held:.0f} of {wanted} elements"
            findings.append(_coverage_finding(key, 1.0 - held / wanted, message))
    for step, names in golden_keys.items():
        for kind, name in sorted(names):
            if (step, kind, name) not in assembled:
                message = f"{kind}: no rank holds any of it"
                findings.append(_coverage_finding((step, kind, name), 1.0, message))
    return _judgement(COVERAGE, len(assembled), findings)


def _coverage_finding(key: Key, missing: float, message: str) -> Finding:
    return Finding(
        check=COVERAGE, tensor=key[2], step=key[0], rank=0, error=missing, bound=0.0, evidence=(message,)
    )


def judge_sharding(assembled: Mapping[Key, Assembled], claims: Mapping[str, Claim]) -> Judgement:
    """Return whether the layout is real: in every group of every axis that should divide something, something is.

    `claims` has one for each axis. A layout that silently replicates everything would otherwise pass every
    other check. A group none of whose ranks holds such a tensor, as a pipeline stage without experts, is left out
    if another holds one.
    """
    findings: list[Finding] = []
    for axis, claim in claims.items():
        regions = [
            {rank: entry.region for rank, entry in tensor.pieces}
            for key, tensor in assembled.items()
            if claim.covers(key)
        ]
        holding = [
            (group, held)
            for group in claim.groups
            if (held := [region for region in regions if any(rank in region for rank in group)])
        ]
        whole = [group for group, held in holding if not any(_differs(region, group) for region in held)]
        if holding and not whole:
            continue
        what = claim.kind if claim.part == "all" else f"{claim.kind} of {_PARTS[claim.part]}"
        group = whole[0] if whole else claim.groups[0]
        findings.append(
            Finding(
                check=SHARDING,
                tensor=f"axis {axis}",
                step=-1,
                rank=group[0],
                error=1.0,
                bound=0.0,
                cause=f"no {what} differs in what the ranks of one {axis} group hold",
                ranks=tuple(sorted({rank for found in whole for rank in found})),
            )
        )
    return _judgement(SHARDING, len(claims), findings)


def _differs(region: Mapping[int, str], group: Sequence[int]) -> bool:
    return len({region.get(rank, "") for rank in group}) > 1


def judge_repeat(
    num_compared: int, differing: Sequence[tuple[int, Key]], coordinates: Coordinates
) -> Judgement:
    """Return whether a second run of the same layout gave the same bits.

    `differing` has (rank, key) for each piece that did not, in the order of the run.
    """
    by_key: dict[Key, list[int]] = {}
    for rank, key in differing:
        by_key.setdefault(key, []).append(rank)
    findings = [
        Finding(
            check=REPEAT,
            tensor=name,
            step=step,
            rank=ranks[0],
            ranks=tuple(ranks),
            coordinates=dict(coordinates.get(ranks[0], {})),
            error=math.inf,
            bound=0.0,
            evidence=(f"{kind}: other bits when the same layout ran a second time",),
        )
        for (step, kind, name), ranks in by_key.items()
    ]
    return _judgement(REPEAT, num_compared, findings)


def _judgement(name: str, num_tensors: int, findings: Sequence[Finding]) -> Judgement:
    worst = max(findings, key=lambda finding: finding.error, default=None)
    result = CheckResult(
        name=name,
        verdict="mismatch" if findings else "pass",
        tensors=num_tensors,
        worst=Worst(tensor=worst.tensor, error=worst.error, bound=0.0, step=worst.step) if worst else None,
    )
    return Judgement((result,), tuple(findings))
