"""Check that the ranks of each group issued the same collectives in the same order, without a hang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from moeverify.cases.axes.groups import name_ranks
from moeverify.cases.schema import Case
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.facts import NumCollectives
from moeverify.results.finding import Finding
from moeverify.results.place import Place
from moeverify.train.program import TrainingProgram
from moeverify.verification.checks.base import (
    Check,
    CheckOutcome,
    RankRun,
    Role,
    ShownTensors,
    Watch,
    make_outcome,
)
from moeverify.verification.collectives.ledger import (
    LedgerEntry,
    Page,
    Stream,
    StreamMismatch,
    find_unequal,
    locate,
)
from moeverify.verification.collectives.trace import CollectiveTrace
from moeverify.verification.compare.gather import gather_on_first


@dataclass(frozen=True)
class Pages:
    """Count and hash of every stream of one rank, and its entries on streams in which ranks differ."""

    pages: Mapping[Stream, Page]
    entries: Mapping[Stream, Sequence[LedgerEntry]]


class _TraceReport(Watch[Pages]):
    """Reports the trace of this rank over all runs of the case."""

    def __init__(self, trace: CollectiveTrace) -> None:
        self._trace = trace

    def report(self) -> Pages:
        # Exchange counts and hashes first. Entries are needed only where these differ.
        pages = self._trace.ledger.pages()
        by_rank = gather_on_first(pages)
        unequal: list[Any] = [find_unequal(by_rank) if by_rank is not None else None]
        dist.broadcast_object_list(unequal)
        return Pages(pages, {stream: self._trace.ledger.entries(stream) for stream in unequal[0]})


class Trace(Check[Pages]):
    """Ledger of each group, compared between its ranks."""

    name = CheckName.TRACE
    role = Role.ORIGIN

    def watch(self, run: RankRun, program: TrainingProgram) -> Watch[Pages]:
        """Return a watch that reports the trace; see `Check`."""
        return _TraceReport(run.trace)

    def judge(self, shown: ShownTensors, reports: Sequence[Pages]) -> CheckOutcome | None:
        """Return the verdict, with a finding for each group whose ranks disagree; see `Check`."""
        if not reports:
            return None
        by_rank = [report.pages for report in reports]
        findings = []
        for stream in reports[0].entries:
            counts = {
                rank: by_rank[rank][stream].number if stream in by_rank[rank] else 0 for rank in stream.ranks
            }
            entries = {rank: reports[rank].entries[stream] for rank in stream.ranks}
            findings.append(_make_finding(shown.case, locate(stream, counts, entries)))
        streams = {stream for pages in by_rank for stream in pages}
        most = max(sum(page.number for page in pages.values()) for pages in by_rank)
        return make_outcome(self.name, findings, len(streams), facts=NumCollectives(most=most))


def _make_finding(case: Case, mismatch: StreamMismatch) -> Finding:
    stream = mismatch.stream
    axis = stream.axis or name_ranks(case, stream.ranks)
    odd = mismatch.find_odd()
    return Finding(
        check=CheckName.TRACE,
        tensor=_name_stream(stream, axis),
        step=-1,
        rank=odd,
        ranks=stream.ranks,
        error=1.0,
        bound=0.0,
        code=Cause.COLLECTIVES,
        facts=mismatch.describe(axis),
        place=Place(ranks=(odd,), axes=(axis,)),
    )


def _name_stream(stream: Stream, axis: str) -> str:
    if stream.is_message:
        sender, receiver = stream.ranks
        return f"messages from {sender} to {receiver} over {axis}"
    return f"{axis} group ({','.join(map(str, stream.ranks))})"


CHECKS = (Trace(),)
