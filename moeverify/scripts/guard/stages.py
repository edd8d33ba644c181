"""Pipeline stages of ranks, from the directions of their messages. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.scripts.guard.lines import StepRecord


def find_stages(records: Mapping[int, StepRecord]) -> dict[int, int]:
    """Return the stage of each rank: the largest number of ranks from which activations have come to it.

    A later stage has received and not sent when its first backward pass begins. All stages are 0 if these
    messages form a ring, as in context parallelism.
    """
    sources: dict[int, set[int]] = {rank: set() for rank in records}
    for rank, record in records.items():
        counts = {group.ranks: group.num_before for group in record.groups if group.is_message}
        for (sender, receiver), number in counts.items():
            if receiver == rank and number and not counts.get((receiver, sender)):
                sources[rank].add(sender)
    stages: dict[int, int] = {}
    while len(stages) < len(sources):
        ready = [rank for rank, known in sources.items() if rank not in stages and known <= stages.keys()]
        if not ready:
            return dict.fromkeys(sources, 0)
        found = {rank: max((stages[each] + 1 for each in sources[rank]), default=0) for rank in ready}
        stages.update(found)
    return stages
