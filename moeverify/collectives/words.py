"""Collectives and hangs in words. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]

_POINT_TO_POINT = ("send", "recv")
_STATES = {"started": "not seen to finish", "finished": "finished", "failed": "broke off"}


def name_collective(record: Record) -> str:
    """Return which collective a record of a trace is: operation, number and group."""
    name = f"{record['op']} #{record['sequence']}"
    if record["op"] in _POINT_TO_POINT:
        name += f" with peer {record['peer']}"
    axis = f"{record['axis']} " if record.get("axis") else ""
    return f"{name} of {axis}group ({_join(record['group'])})"


def describe_record(record: Record) -> str:
    """Return one line on a collective of a trace: which, on what, from where, and whether it is over."""
    line = name_collective(record)
    if record["num_tensors"]:
        line += f" on {record['dtype']}{record['shape']}"
    if record["num_tensors"] > 1:
        line += f" and {record['num_tensors'] - 1} more"
    return f"{line}, called at {record['site']}, {_STATES[record['state']]}"


def explain_disagreement(records: Mapping[int, Sequence[Record]]) -> str:
    """Return where the ranks of one group first issued different collectives, as far as the traces go back."""
    seen: dict[tuple[str, str, int], dict[int, Record]] = {}
    for rank, trace in records.items():
        for record in trace:
            if record["op"] not in _POINT_TO_POINT:
                key = (record["group_name"], _join(record["group"]), record["sequence"])
                seen.setdefault(key, {})[rank] = record
    for (*_, number), by_rank in sorted(seen.items(), key=lambda item: item[0][2]):
        if len({record.get("signature") for record in by_rank.values()}) > 1:
            told = "; ".join(
                f"rank {rank} {record['signature']}, called at {record['site']}"
                for rank, record in by_rank.items()
            )
            group = name_collective(next(iter(by_rank.values()))).partition(" of ")[2]
            return f"the ranks disagree on collective #{number} of {group}: {told}"
    return ""


def explain_hang(
    records: Mapping[int, Sequence[Record]], places: Mapping[int, str]
) -> tuple[str, dict[int, str], list[int]]:
    """Return a hang in words, what each rank does in words, and the ranks the others wait for.

    `records` holds each rank's trace, oldest first; `places` where each rank's code is, or nothing.
    """
    waiting = {rank: _find_open(trace) for rank, trace in records.items()}
    doings = {
        rank: f"waits in {_name_with_site(record)}"
        if record is not None
        else f"waits in no collective, {_name_place(places.get(rank, ''))}"
        for rank, record in waiting.items()
    }
    gathered: dict[str, tuple[Record, list[int]]] = {}
    for rank, record in waiting.items():
        if record is not None:
            key = f"{name_collective(record)} {record['group_name']}"
            gathered.setdefault(key, (record, []))[1].append(rank)
    late = [rank for rank, record in waiting.items() if record is None]
    if not gathered:
        which = "; ".join(f"rank {rank} {doings[rank]}" for rank in late)
        return f"no rank waits in a collective: {which}", doings, late
    sentences = []
    for record, ranks in gathered.values():
        whys = [
            _explain_absence(rank, record, records[rank], waiting[rank], places.get(rank, ""))
            for rank in _find_members(record)
            if rank not in ranks and rank in records
        ]
        head = "rank {} waits" if len(ranks) == 1 else "ranks {} wait"
        head = head.format(_join(ranks, ", "))
        sentences.append("; ".join([f"{head} in {_name_with_site(record)}", *whys]))
    return ". ".join(sentences), doings, late


def _find_open(trace: Sequence[Record]) -> Record | None:
    return next((record for record in trace if record["state"] == "started"), None)


def _find_members(record: Record) -> list[int]:
    """Return the global ranks that a collective needs."""
    group: list[int] = record["group"]
    if record["op"] not in _POINT_TO_POINT:
        return group
    return [group[record["peer"]]] if 0 <= record["peer"] < len(group) else []


def _explain_absence(
    rank: int, record: Record, trace: Sequence[Record], waiting: Record | None, place: str
) -> str:
    def is_alike(other: Record) -> bool:
        same_kind = (other["op"] in _POINT_TO_POINT) == (record["op"] in _POINT_TO_POINT)
        return same_kind and all(other[key] == record[key] for key in ("group", "group_name"))

    if waiting is not None:
        how = "entered another one of that group" if is_alike(waiting) else "never entered it"
        return f"rank {rank} {how}: it waits in {_name_with_site(waiting)}"
    alike = [each["sequence"] for each in trace if is_alike(each)]
    how = "has left it" if max(alike, default=0) >= record["sequence"] else "never entered it"
    return f"rank {rank} {how}: {_name_place(place)}"


def _name_with_site(record: Record) -> str:
    return f"{name_collective(record)} called at {record['site']}"


def _name_place(place: str) -> str:
    return f"it is at {place}" if place else "where it is, is not known"


def _join(ranks: Sequence[int], mark: str = ",") -> str:
    return mark.join(str(rank) for rank in ranks)
