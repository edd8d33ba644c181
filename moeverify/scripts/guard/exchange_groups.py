"""Whether ranks exchange activations, without which they cannot hold parts of one model. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moeverify.scripts.guard.lines import StepRecord


def exchange_activations(ranks: Iterable[int], records: Mapping[int, StepRecord]) -> bool:
    """Return whether some of these ranks exchange more than a few numbers in a forward pass, or messages.

    True if the collectives of a rank are not known.
    """
    members = set(ranks)
    for rank in members & records.keys():
        record = records[rank]
        if not record.is_traced:
            return True
        messages = (group.ranks for group in record.groups if group.is_message)
        if any(len(members.intersection(group)) > 1 for group in (*record.exchanged, *messages)):
            return True
    return False
