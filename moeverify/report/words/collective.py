"""Sentences about collectives: names, call sites, waiting ranks, and disagreements."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.results.failure import Absence, Disagreement, Hang, Waiting
from moeverify.results.trace import CollectiveRecord

_ABSENCES = {
    "in another of the group": "entered another collective of that group",
    "has left": "has left it",
    "never entered": "never entered it",
    "queued": "has it queued behind another collective",
}
Groups = frozenset[str]
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
    return ". ".join(list_waits(hang))


def list_waits(hang: Hang) -> list[str]:
    """Return a sentence for each collective in which ranks wait: its ranks, and why their peers are absent."""
    alike = _find_alike(hang)
    sentences = []
    for wait in hang.waits:
        noun = (
            f"rank {wait.ranks[0]} waits" if len(wait.ranks) == 1 else f"ranks {_join(wait.ranks, ', ')} wait"
        )
        absent = (_describe_absence(absence, alike) for absence in wait.absent)
        sentences.append("; ".join([f"{noun} in {_name_with_site(wait.collective, alike)}", *absent]))
    return sentences


def _find_alike(hang: Hang) -> Groups:
    """Return the groups of a hang that have the same ranks and axis as another one of the same hang."""
    records = [wait.collective for wait in hang.waits]
    records += [
        each.waiting.collective for wait in hang.waits for each in wait.absent if each.waiting.collective
    ]
    names: dict[str, set[str]] = {}
    for record in records:
        names.setdefault(_name_group(record), set()).add(record.group_name)
    return frozenset(shown for shown, found in names.items() if len(found) > 1)


def describe_waiting(waiting: Waiting, alike: Groups = frozenset()) -> str:
    """Return the activity of one rank: `waits in ...`. Groups in `alike` are shown with their names in torch."""
    if waiting.collective is not None:
        return f"waits in {_name_with_site(waiting.collective, alike)}"
    return f"waits in no collective, {_name_place(waiting)}"


def _describe_absence(absence: Absence, alike: Groups) -> str:
    how = _ABSENCES[absence.how]
    if absence.waiting.collective is not None:
        return f"rank {absence.rank} {how}: it {describe_waiting(absence.waiting, alike)}"
    return f"rank {absence.rank} {how}: {_name_place(absence.waiting)}"


def _name_with_site(record: CollectiveRecord, alike: Groups) -> str:
    name = f", named {record.group_name}," if _name_group(record) in alike else ""
    return f"{name_collective(record)}{name} called at {record.site}"


def _name_place(waiting: Waiting) -> str:
    if waiting.has_ended:
        return "its process has ended"
    return f"it is at {waiting.place}" if waiting.place else "its place is not known"


def _join(ranks: Sequence[int], mark: str = ",") -> str:
    return mark.join(map(str, ranks))
