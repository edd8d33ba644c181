"""The collectives of one step of a rank, by process group."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch.distributed as dist

from moeverify.scripts.guard.lines import GroupLine
from moeverify.verification.collectives.interception import describe_group
from moeverify.verification.collectives.trace import CollectiveTrace

_MOST_ENTRIES = 2048


def describe_groups(
    trace: CollectiveTrace, since: int, before: Mapping[object, int]
) -> tuple[GroupLine, ...]:
    """Return a summary of a trace for each group, and for each pair of sender and receiver.

    `since` is the number of the last collective before them, and `before` has for each stream how many came
    before the first backward pass.
    """
    largest: dict[tuple[int, ...], int] = {}
    sums: dict[tuple[int, ...], int] = {}
    for record in trace.since(since):
        size = math.prod(record.shape) * max(record.num_tensors, 1)
        for sizes in (largest, sums) if "reduce" in record.op else (largest,):
            sizes[record.group] = max(sizes.get(record.group, 0), size)
    return tuple(
        GroupLine(
            name=stream.group,
            ranks=stream.ranks,
            axis=stream.axis,
            is_message=stream.is_message,
            number=page.number,
            num_before=before.get(stream, 0),
            hash=page.hash,
            largest=largest.get(stream.ranks, 0),
            largest_sum=sums.get(stream.ranks, 0),
            entries=tuple(
                (entry.signature, entry.site) for entry in trace.ledger.entries(stream)[:_MOST_ENTRIES]
            ),
        )
        for stream, page in trace.ledger.pages().items()
    )


def list_groups() -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the mesh axis and global ranks of each process group of this rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return ()
    # torch has no public list of process groups.
    groups = [describe_group(each) for each in dist.distributed_c10d._world.pg_map]
    return tuple((group.axis, tuple(group.ranks)) for group in groups)
