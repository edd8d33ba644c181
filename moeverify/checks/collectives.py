"""On every rank: whether the ranks of each group have issued the same collectives, in a run that did not hang."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from moeverify.axes.groups import name_ranks
from moeverify.case.schema import Case
from moeverify.collectives.ledger import Disagreement, Stream, describe, find_unequal, locate
from moeverify.collectives.trace import CollectiveTrace
from moeverify.compare.judging import Judgement
from moeverify.results.cause import Cause
from moeverify.results.checks import TRACE
from moeverify.results.finding import CheckResult, Finding
from moeverify.results.place import Place


def judge_trace(case: Case, trace: CollectiveTrace) -> Judgement | None:
    """Return on rank 0 whether all groups agree, with a finding for each that does not; None elsewhere.

    Counts and hashes are compared; only where they differ the ranks send what they issued. Collective: all ranks.
    """
    pages = trace.ledger.pages()
    by_rank = _gather(pages)
    unequal: list[Any] = [find_unequal(by_rank) if by_rank is not None else None]
    dist.broadcast_object_list(unequal)
    kept = _gather({stream: trace.ledger.entries(stream) for stream in unequal[0]}) if unequal[0] else None
    if by_rank is None:
        return None
    findings = []
    for stream in unequal[0]:
        assert kept is not None
        entries = {rank: kept[rank][stream] for rank in stream.ranks}
        counts = {
            rank: by_rank[rank][stream].number if stream in by_rank[rank] else 0 for rank in stream.ranks
        }
        findings.append(_make_finding(case, locate(stream, counts, entries)))
    streams = {stream for found in by_rank for stream in found}
    number = max((sum(page.number for page in found.values()) for found in by_rank), default=0)
    check = CheckResult(
        name=TRACE,
        verdict="mismatch" if findings else "pass",
        tensors=len(streams),
        note=f"up to {number} collectives of a rank",
    )
    return Judgement((check,), tuple(findings))


def _make_finding(case: Case, disagreement: Disagreement) -> Finding:
    stream = disagreement.stream
    ranks = ",".join(map(str, stream.ranks))
    axis = stream.axis or name_ranks(case, stream.ranks)
    lines = describe(disagreement)
    odd = _find_odd(disagreement)
    what = f"collective #{disagreement.number} of {axis} group ({ranks})"
    counts = ", ".join(f"rank {rank} {count}" for rank, count in disagreement.counts.items())
    return Finding(
        check=TRACE,
        tensor=_name_stream(stream, axis, ranks),
        step=-1,
        rank=odd,
        ranks=stream.ranks,
        error=1.0,
        bound=0.0,
        cause=f"the ranks issue different collectives, first as {what}",
        code=Cause.COLLECTIVES.value,
        where=f"axis {axis}",
        evidence=(*lines, f"issued in all: {counts}"),
        place=Place(ranks=(odd,), axes=(axis,), collectives=tuple(lines)),
    )


def _name_stream(stream: Stream, axis: str, ranks: str) -> str:
    pair = stream.group.partition(" from ")[2]
    return f"messages from {pair} over {axis}" if pair else f"{axis} group ({ranks})"


def _find_odd(disagreement: Disagreement) -> int:
    """Return a rank that does what the fewest do."""
    groups: dict[str, list[int]] = {}
    for rank, entry in disagreement.entries.items():
        groups.setdefault(entry.signature if entry is not None else "", []).append(rank)
    return min(groups.values(), key=lambda members: (len(members), -members[0]))[0]


def _gather(value: Any) -> list[Any] | None:
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, gathered)
    return gathered
