"""Check that ranks with the same part of a logical tensor hold the same bits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from moeverify.results.checks import CheckName
from moeverify.results.comparable import comparable
from moeverify.results.facts import ReplicaFacts
from moeverify.results.finding import Finding
from moeverify.results.place import Place
from moeverify.verification.checks.base import (
    Check,
    CheckOutcome,
    ComparedTensors,
    ShownTensors,
    make_outcome,
)
from moeverify.verification.checks.golden_tensors import CHECKS as COMPARED
from moeverify.verification.compare.assembled import Assembled, Coordinates


class Replicas(Check[Any]):
    """Bitwise comparison of replicas, for every kind of tensor and regardless of its bound.

    Replicas come from one computation or one collective, so they must be equal. Kinds whose own check the
    case skips are skipped here too, for example a gradient norm that each rank computes on its own.
    """

    name = CheckName.REPLICAS

    def judge(self, shown: ShownTensors, reports: Sequence[Any]) -> CheckOutcome:
        """Return the verdict, with a finding for each tensor whose replicas differ; see `Check`."""
        skipped = {kind for check in COMPARED if check.name in shown.case.checks.skip for kind in check.kinds}
        return self.compare(shown, skipped)

    def compare(self, shown: ComparedTensors, skipped: Collection[str] = ()) -> CheckOutcome:
        """Return the verdict on all kinds except the skipped ones."""
        findings: list[Finding] = []
        num_compared = 0
        for tensor in shown.tensors.values():
            if tensor.key[1] in skipped:
                continue
            by_region: dict[str, dict[int, list[int]]] = {}
            for rank, entry in tensor.shards:
                # Ranks without elements of a region have nothing to agree on.
                if entry.difference.count:
                    by_region.setdefault(entry.region, {}).setdefault(entry.bits, []).append(rank)
            replicated = {
                region: by_bits
                for region, by_bits in by_region.items()
                if sum(map(len, by_bits.values())) > 1
            }
            num_compared += bool(replicated)
            differing = next((region for region, by_bits in replicated.items() if len(by_bits) > 1), None)
            if differing is not None:
                findings.append(_make_finding(shown, tensor, differing, replicated[differing]))
        return make_outcome(self.name, findings, num_compared)


def _make_finding(
    shown: ComparedTensors, tensor: Assembled, region: str, by_bits: Mapping[int, Sequence[int]]
) -> Finding:
    entries = {rank: entry for rank, entry in tensor.shards if entry.region == region}
    groups = sorted(by_bits.values(), key=len, reverse=True)
    odd = max(
        (rank for group in groups for rank in group),
        key=lambda rank: comparable(entries[rank].difference.sum_error2),
    )
    entry = entries[odd]
    ranks = tuple(rank for group in groups for rank in group)
    axes = _find_axes_between(groups, shown.coordinates)
    return shown.make_finding(
        CheckName.REPLICAS,
        tensor.key,
        ranks,
        rank=odd,
        error=entry.difference.relative_error,
        index=entry.index,
        expected=entry.difference.expected_at,
        actual=entry.difference.actual_at,
        facts=ReplicaFacts(groups=tuple(map(tuple, groups)), axes=axes),
        place=Place(ranks=ranks, axes=axes),
    )


def _find_axes_between(groups: Sequence[Sequence[int]], coordinates: Coordinates) -> tuple[str, ...]:
    """Return the axes on which ranks of one group agree and ranks of different groups differ."""
    return tuple(
        axis
        for axis in coordinates.get(groups[0][0], {})
        if all(len({coordinates[rank][axis] for rank in group}) == 1 for group in groups)
        and len({coordinates[group[0]][axis] for group in groups}) > 1
    )


CHECKS = (Replicas(),)
