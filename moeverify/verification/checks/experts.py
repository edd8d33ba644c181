"""Check of the identity of each expert after a load, by a hash that does not depend on the sharding.

Every element yields a hash of its bits and its place in the expert. The hash of an expert is their sum
modulo 2**64. Ranks can therefore add their shares under any layout. A lost, copied or exchanged expert
shows under its global number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from moeverify.cases.schema import Case
from moeverify.hashing import GOLDEN_RATIO, STRIDE, mix
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import CheckName
from moeverify.results.facts import ExpertFacts
from moeverify.results.finding import Finding
from moeverify.train.subjects import subject_of
from moeverify.verification.checks.base import Check, CheckOutcome, RankLoad, ShownTensors, make_outcome
from moeverify.verification.compare.difference import INTEGERS

_MASK = (1 << 64) - 1

Shares = Sequence[tuple[str, str, list[int]]]  # (tensor, key of the region, a share of each expert's hash)


class ExpertHashes(Check[Shares]):
    """Hash of each expert of each tensor, compared with the saved hash."""

    name = CheckName.EXPERTS

    def inspect(self, load: RankLoad) -> Shares:
        """Return this rank's shares of the hashes; see `Check`."""
        return hash_state(load.case, load.tensors)

    def judge(self, shown: ShownTensors, reports: Sequence[Shares]) -> CheckOutcome | None:
        """Return whether every expert has the saved values of its number; see `Check`."""
        if shown.saved is None:
            return None
        return judge_experts(shown.saved.summary[CheckName.EXPERTS], merge_hashes(reports))


def hash_state(case: Case, tensors: Iterable[tuple[str, Tensor, Region]]) -> Shares:
    """Return this rank's share of the hash of each expert, for weights and moments."""
    subject = subject_of(case.recipe)
    return [
        (name, region.key, hash_experts(local, region).tolist())
        for name, local, region in tensors
        if subject.count_experts(name, region.shape) and region.numel
    ]


def hash_experts(local: Tensor, region: Region) -> Tensor:
    """Return this rank's share of each expert's hash.

    Shapes: `local` holds `region` of a tensor (experts, ...); the result is (experts,) int64.
    """
    num_experts = region.shape[0]
    place = region.flat_index(device=local.device).reshape(-1)
    size = max(math.prod(region.shape[1:]), 1)
    expert = torch.div(place, size, rounding_mode="floor")
    # The place is mixed in: a permutation inside an expert changes its hash.
    hashes = mix(mix(_bits(local) * GOLDEN_RATIO + (place - expert * size) * STRIDE) + STRIDE)
    return torch.zeros(num_experts, dtype=torch.int64, device=local.device).index_add_(0, expert, hashes)


def _bits(local: Tensor) -> Tensor:
    """Return the bits of each element, as int64."""
    flat = local.detach().contiguous().reshape(-1)
    return flat.view(INTEGERS[flat.element_size()]).to(torch.int64)


def merge_hashes(by_rank: Sequence[Shares]) -> dict[str, list[int]]:
    """Return the hash of each expert of each tensor, from all ranks' shares. Each region counts once."""
    merged: dict[str, dict[str, list[int]]] = {}
    for shares in by_rank:
        for name, region, share in shares:
            merged.setdefault(name, {}).setdefault(region, share)
    return {
        # Sums of int64 wrap around on the ranks, and do not in Python.
        name: [sum(column) & _MASK for column in zip(*regions.values(), strict=True)]
        for name, regions in merged.items()
    }


def judge_experts(expected: Mapping[str, Sequence[int]], actual: Mapping[str, Sequence[int]]) -> CheckOutcome:
    """Return the verdict: every expert has the saved values of its number, and no two experts are equal."""
    findings = []
    for name, wanted in expected.items():
        found = actual.get(name, [])
        wrong = [
            number for number, value in enumerate(wanted) if number >= len(found) or found[number] != value
        ]
        twins = len(set(found)) < len(found) and len(set(wanted)) == len(wanted)
        if not wrong and not twins:
            continue
        findings.append(
            Finding(
                check=CheckName.EXPERTS,
                tensor=name,
                step=-1,
                rank=0,
                error=len(wrong) / len(wanted),
                bound=0.0,
                facts=ExpertFacts(
                    wrong=tuple((number, _find_twin(number, found, wanted)) for number in wrong)
                ),
            )
        )
    return make_outcome(CheckName.EXPERTS, findings, len(expected))


def _find_twin(number: int, found: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Return the saved expert whose values this expert has; None if there is none."""
    if number < len(found) and found[number] in wanted:
        return list(wanted).index(found[number])
    return None


CHECKS = (ExpertHashes(),)
