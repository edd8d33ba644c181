"""Sentences about collectives: names, call sites, waiting ranks, and disagreements."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.results.failure import Absence, Disagreement, Hang, Waiting
from moeverify.results.trace import CollectiveRecord

_ABSENCES = {
    "in another of the group": "entered another one of that group",
    "has left": "has left it",
    "never entered": "never entered it",
}
_STATES = {"started": "not seen to finish", "finished": "finished", "failed": "broke off"}


def name_collective(record: CollectiveRecord) -> str:
    """Return the name of a collective: operation, number and group."""
    peer = f" with peer {record.peer}" if record.is_point_to_point else ""
    return f"{record.op} #{record.sequence}{peer} of {_name_group(record)}"


def _name_group(record: CollectiveRecord) -> str:
    axis = f"{record.axis} " if record.axis else ""
    return f"{axis}group ({_join(record.group)})"


def describe_record(record: CollectiveRecord) -> str:
    """Return one line about a collective: name, tensors, call site, state."""
    line = name_collective(record)
    if record.num_tensors:
        line += f" on {record.dtype}{list(record.shape)}"
    if record.num_tensors > 1:
        line += f" and {record.num_tensors - 1} more"
    return f"{line}, called at {record.site}, {_STATES[record.state]}"


def describe_disagreement(disagreement: Disagreement) -> str:
    """Return the collective on which the ranks of a group disagree, and the operation each rank issued."""
    issued = "; ".join(
        f"rank {rank} {record.signature}, called at {record.site}"
        for rank, record in disagreement.by_rank.items()
    )
    first = next(iter(disagreement.by_rank.values()))
    return f"the ranks disagree on collective #{first.sequence} of {_name_group(first)}: {issued}"


def describe_hang(hang: Hang) -> str:
    """Return which ranks wait in which collective, and why their peers are absent."""
    if not hang.waits:
        which = "; ".join(
            f"rank {rank} {describe_waiting(Waiting(place=place))}" for rank, place in hang.places.items()
        )
        return f"no rank waits in a collective: {which}"
    sentences = []
    for wait in hang.waits:
        noun = (
            f"rank {wait.ranks[0]} waits" if len(wait.ranks) == 1 else f"ranks {_join(wait.ranks, ', ')} wait"
        )
        clauses = [f"{noun} in {_name_with_site(wait.collective)}", *map(_describe_absence, wait.absent)]
        sentences.append("; ".join(clauses))
    return ". ".join(sentences)


def describe_waiting(waiting: Waiting) -> str:
    """Return the activity of one rank: `waits in ...`."""
    if waiting.collective is not None:
        return f"waits in {_name_with_site(waiting.collective)}"
    return f"waits in no collective, {_name_place(waiting.place)}"


def _describe_absence(absence: Absence) -> str:
    how = _ABSENCES[absence.how]
    if absence.waiting.collective is not None:
        return f"rank {absence.rank} {how}: it {describe_waiting(absence.waiting)}"
    return f"rank {absence.rank} {how}: {_name_place(absence.waiting.place)}"


def _name_with_site(record: CollectiveRecord) -> str:
    return f"{name_collective(record)} called at {record.site}"


def _name_place(place: str) -> str:
    return f"it is at {place}" if place else "where it is, is not known"


def _join(ranks: Sequence[int], mark: str = ",") -> str:
    return mark.join(map(str, ranks))
