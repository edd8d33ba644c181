"""The identity of each expert: a hash of its values that does not depend on how they are divided.

Every element gives a hash of its bits and its place in the expert; the hash of an expert is their sum modulo
2**64. So ranks add up what they hold, whatever the layout, and an expert that was lost, copied or exchanged
is seen by its global number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moeverify.compare.difference import INTEGERS, STRIDE
from moeverify.compare.judging import Judgement
from moeverify.hashing import GOLDEN_RATIO, mix
from moeverify.layout.region import Region
from moeverify.results.checks import EXPERTS
from moeverify.results.finding import CheckResult, Finding, Worst

_MASK = (1 << 64) - 1

Shares = Mapping[str, tuple[str, list[int]]]  # tensor: (key of the region, a share of each expert's hash)


def hash_experts(local: Tensor, region: Region) -> Tensor:
    """Return this rank's share of each expert's hash.

    Shapes: `local` holds `region` of a tensor (experts, ...); the result is (experts,) int64.
    """
    num_experts = region.shape[0]
    place = region.flat_index(device=local.device).reshape(-1)
    size = max(math.prod(region.shape[1:]), 1)
    expert = torch.div(place, size, rounding_mode="floor")
    hashes = mix(mix(_bits(local) * GOLDEN_RATIO + (place - expert * size) * STRIDE) + STRIDE)
    return torch.zeros(num_experts, dtype=torch.int64, device=local.device).index_add_(0, expert, hashes)


def _bits(local: Tensor) -> Tensor:
    """Return the bits of each element, as int64."""
    flat = local.detach().contiguous().reshape(-1)
    return flat.view(INTEGERS[flat.element_size()]).to(torch.int64)


def merge_hashes(by_rank: Sequence[Shares]) -> dict[str, list[int]]:
    """Return the hash of each expert of each tensor from the shares of all ranks, each region once."""
    merged: dict[str, dict[str, list[int]]] = {}
    for shares in by_rank:
        for name, (region, share) in shares.items():
            merged.setdefault(name, {}).setdefault(region, share)
    return {
        name: [sum(column) & _MASK for column in zip(*regions.values(), strict=True)]
        for name, regions in merged.items()
    }


def judge_experts(expected: Mapping[str, Sequence[int]], actual: Mapping[str, Sequence[int]]) -> Judgement:
    """Return whether every expert has the values of the expert of its number, and no two have the same."""
    findings = []
    for name, wanted in expected.items():
        found = actual.get(name, [])
        wrong = [
            number for number, value in enumerate(wanted) if number >= len(found) or found[number] != value
        ]
        twins = len(set(found)) < len(found) and len(set(wanted)) == len(wanted)
        if not wrong and not twins:
            continue
        said = [_describe(number, found, wanted) for number in wrong[:4]]
        if len(wrong) > 4:
            said.append(f"and {len(wrong) - 4} more")
        findings.append(
            Finding(
                check=EXPERTS,
                tensor=name,
                step=-1,
                rank=0,
                error=len(wrong) / len(wanted),
                bound=0.0,
                where=f"expert {wrong[0]}" if wrong else "",
                evidence=(f"by global number: {', '.join(said)}",),
            )
        )
    worst = findings[0] if findings else None
    result = CheckResult(
        name=EXPERTS,
        verdict="mismatch" if findings else "pass",
        tensors=len(expected),
        worst=Worst(tensor=worst.tensor, error=worst.error, bound=0.0) if worst else None,
    )
    return Judgement((result,), tuple(findings))


def _describe(number: int, found: Sequence[int], wanted: Sequence[int]) -> str:
    if number < len(found) and found[number] in wanted:
        return f"{number} is {list(wanted).index(found[number])}"
    return f"{number} is none of them"
