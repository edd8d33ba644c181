"""Detection of experts on one rank with equal initial values, whose gradients differ only by tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor

from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.results.finding import Finding, make_finding
from moeverify.results.guard import AlikeFacts, GuardCheck
from moeverify.scripts.guard.replicas import is_expert
from moeverify.scripts.guard.samples import measure_samples


def find_equal_experts(shards: Sequence[LocalShard], rank: int) -> list[Finding]:
    """Return a finding if experts of this rank have equal values: slices of one tensor, or numbered siblings.

    Constant values, such as zero biases, are ignored: they are equal in every model.
    """
    families: dict[str, list[Tensor]] = {}
    for shard in shards:
        local = shard.local()
        if not is_expert(shard.name) or local.ndim < 2 or not local.is_floating_point():
            continue
        # `experts.up` (E, m, n), or `experts.3.up.weight` (m, n): the last number after `experts` is the
        # expert.
        numbered = re.sub(r"(expert[^.]*(?:\.[^.\d]+)*)\.\d+", r"\1.*", shard.name)
        slices = list(local) if numbered == shard.name and local.ndim > 2 else [local]
        families.setdefault(numbered, []).extend(slices)
    alike: dict[tuple[int, int], list[str]] = {}
    for name, members in families.items():
        varied = [each for each in members if bool((each != each.reshape(-1)[0]).any())]
        hashes = measure_samples(varied).hashes
        num_alike = max((hashes.count(bits) for bits in set(hashes)), default=0)
        if num_alike > 1:
            alike.setdefault((num_alike, len(members)), []).append(name)
    return [
        make_finding(
            GuardCheck.EXPERTS,
            names[0],
            -1,
            (rank,),
            AlikeFacts(names=tuple(names), num_alike=number, num_experts=count),
        )
        for (number, count), names in alike.items()
    ]
