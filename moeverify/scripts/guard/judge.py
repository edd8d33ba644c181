"""Joint evaluation of the ranks' records: findings that no rank can make alone. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.comparable import comparable
from moeverify.results.finding import Finding, make_finding
from moeverify.results.guard import DriftFacts, GuardCheck, NonfiniteFacts
from moeverify.results.script import CallFacts, CallRule, MemberFacts, ScriptCheck
from moeverify.results.step_facts import RecomputedFacts
from moeverify.scripts.guard.copies import CopyRule
from moeverify.scripts.guard.exchange import Inbox
from moeverify.scripts.guard.lines import GroupLine, RankHeader, StepRecord
from moeverify.scripts.guard.norms import NormRule
from moeverify.scripts.guard.replicas import ReplicaRule, find_replicas, find_tied
from moeverify.scripts.guard.tokens import TokenRule
from moeverify.scripts.record.sites import BACKWARD, CLIP, DATA, STEP, USED, list_sites
from moeverify.train.calls.rules import find_emptied
from moeverify.verification.collectives.ledger import LedgerEntry, Page, Stream, find_unequal, locate

_IDLE_STEPS = 3  # sampled steps: from the third on, parameters without an optimizer are known
_NO_ROWS = "data: no inputs of two or more dims were seen"


class Judge:
    """An evaluator of records as they arrive; each finding is reported once."""

    def __init__(self, folder: Path) -> None:
        self._inbox = Inbox(folder)
        self._replicas: ReplicaRule | None = None
        self._norms: NormRule
        self._tokens: TokenRule
        self._copies: CopyRule
        self._done: set[object] = set()
        self._has_rows = False
        self._lags = False  # whether a rank has skipped optimizer steps: other steps are then compared
        self._is_uneven = False  # whether ranks step their optimizers at different places
        self.num_steps = 0
        self.unjudged: dict[str, None] = {}

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks that have described themselves."""
        return len(self._inbox.headers)

    @property
    def num_missing(self) -> int:
        """Return the number of ranks that have not described themselves."""
        return max(self._inbox.world_size - self.num_ranks, 0)

    def look(self, *, is_over: bool = False) -> list[Finding]:
        """Return the findings in the steps recorded by all ranks, or in all steps when the script is over."""
        return [
            add_sites(finding, records, self._inbox.headers)
            for records in self._inbox.take(is_over=is_over)
            for finding in self._judge(records)
        ]

    def remove(self) -> None:
        """Remove all files of the ranks."""
        self._inbox.remove()

    def _judge(self, records: Mapping[int, StepRecord]) -> Iterator[Finding]:
        yield from self._find_bad(records)
        if self._lags:
            self.unjudged["later steps: ranks skip different optimizer steps"] = None
            return
        yield from self._merge(records)
        sampled = {rank: record for rank, record in records.items() if record.ended}
        if not sampled:
            return
        self.num_steps += 1
        if self._replicas is None and any(record.began for record in sampled.values()):
            headers = self._inbox.headers
            stages = find_stages(sampled)
            equal, unequal = find_replicas(headers, sampled, stages)
            tied = find_tied(headers, sampled, stages)
            self._replicas = ReplicaRule([*equal, *tied], unequal, headers)
            self._norms = NormRule(equal, unequal, len(headers))
            self._tokens = TokenRule(headers)
            self._copies = CopyRule(headers, stages)
        yield from self._find_forgotten(sampled)
        yield from self._find_idle(sampled)
        is_complete = len(sampled) == self.num_ranks
        self.unjudged |= dict.fromkeys(text for record in sampled.values() for text in record.unjudged)
        if any(each.written for each in sampled.values()):
            self.unjudged["changes of weights between optimizer steps"] = None
        if not is_complete:
            self.unjudged["replicas, data and norms of steps that some ranks did not finish"] = None
        if self._replicas is None or not is_complete:
            return
        disorder, drift = list(self._find_collectives(sampled)), list(self._replicas.find(sampled))
        lagging = find_lagging(sampled) if disorder or drift else None
        if lagging is not None:
            self._lags = True
            yield lagging
            return
        yield from disorder
        yield from self._tokens.find(sampled)
        self._note_rows(list(sampled.values()))
        yield from self._copies.find(sampled)
        # Without replicas that are equal, no norm is right.
        if self._replicas.has_unequal_replicas(sampled):
            self.unjudged["gradient norms: replicas hold different values"] = None
        else:
            yield from self._norms.find(sampled)
            self.unjudged |= dict.fromkeys(self._norms.list_unjudged(sampled))
        yield from drift

    def _note_rows(self, records: Sequence[StepRecord]) -> None:
        """Mention that no rows were seen, until some are: of a `forward` called directly, the first are unseen."""
        self._has_rows |= any(record.rows for record in records)
        if self._has_rows:
            self.unjudged.pop(_NO_ROWS, None)
        else:
            self.unjudged[_NO_ROWS] = None

    def _merge(self, records: Mapping[int, StepRecord]) -> Iterator[Finding]:
        """Yield the findings of single ranks, merged over ranks; also merge findings of updates by cause."""
        by_key: dict[object, list[Finding]] = {}
        for record in records.values():
            for finding in record.findings:
                by_key.setdefault(_key_of(finding), []).append(finding)
        for key, found in by_key.items():
            if key not in self._done:
                self._done.add(key)
                worst = max(found, key=lambda finding: comparable(finding.error))
                ranks = tuple(sorted({finding.rank for finding in found}))
                tensors = tuple(dict.fromkeys(finding.tensor for finding in found))
                changes: dict[str, object] = {"ranks": ranks}
                if isinstance(worst.facts, RecomputedFacts):
                    others = tuple(name for name in tensors if name != worst.tensor)
                    changes["facts"] = worst.facts.model_copy(update={"others": others})
                yield worst.model_copy(update=changes)

    def _find_forgotten(self, records: Mapping[int, StepRecord]) -> Iterator[Finding]:
        names = list(dict.fromkeys(name for record in records.values() for name in record.forgotten))
        if names and "forgotten" not in self._done:
            self._done.add("forgotten")
            ranks = tuple(rank for rank, record in records.items() if record.forgotten)
            first = records[ranks[0]]
            yield _make_member_finding(
                first.step, ranks, names, "replaced" if first.is_replaced else "missing"
            )

    def _find_idle(self, records: Mapping[int, StepRecord]) -> Iterator[Finding]:
        """Yield a finding if no optimizer of torch has got a gradient in the first sampled steps."""
        ranks = tuple(rank for rank, record in records.items() if record.is_idle and not record.forgotten)
        if not ranks or "forgotten" in self._done or self.num_steps < _IDLE_STEPS:
            return
        if any(not record.is_known_kind or not _has_backward(record) for record in records.values()):
            return
        if any(find_emptied(record.calls) is not None for record in records.values()):
            return  # the rule for calls names the zero_grad
        self._done.add("forgotten")
        names = [line.name for line in self._inbox.headers[ranks[0]].tensors]
        yield _make_member_finding(records[ranks[0]].step, ranks, names, "idle")

    def _find_bad(self, records: Mapping[int, StepRecord]) -> Iterator[Finding]:
        bad = {rank: record.nonfinite for rank, record in records.items() if record.nonfinite is not None}
        if not bad or "bad" in self._done:
            return
        self._done.add("bad")
        # A module is closer to the cause than a loss. Among modules the first in execution order counts.
        first = min(bad.values(), key=lambda each: (each.what != "output", each.order))
        ranks = tuple(rank for rank, each in bad.items() if each == first)
        yield make_finding(
            GuardCheck.FINITE,
            first.module or "loss",
            records[ranks[0]].step,
            ranks,
            NonfiniteFacts(what=first.what, module=first.module),
            error=float("inf"),
            rank=ranks[0],
        )

    def _find_collectives(self, records: Mapping[int, StepRecord]) -> Iterator[Finding]:
        if "collectives" in self._done or sorted(records) != list(range(len(records))):
            return
        # The collectives of a step lie between two optimizer steps, which ranks must make at the same places.
        steps = {sum(call.name == "optimizer step" for call in record.calls) for record in records.values()}
        self._is_uneven |= len(steps) > 1 or not all(record.is_traced for record in records.values())
        if self._is_uneven:
            self.unjudged["order of collectives: ranks step their optimizers at different places"] = None
            return
        lines = [{_stream(group): group for group in records[rank].groups} for rank in sorted(records)]
        pages = [{stream: Page(line.number, line.hash) for stream, line in each.items()} for each in lines]
        for stream in find_unequal(pages):
            if stream.is_message and records[stream.ranks[1]].takes_any:
                continue
            own = {rank: lines[rank].get(stream) for rank in stream.ranks if rank < len(lines)}
            counts = {rank: 0 if line is None else line.number for rank, line in own.items()}
            entries = {
                rank: [] if line is None else [LedgerEntry(*entry) for entry in line.entries]
                for rank, line in own.items()
            }
            found = locate(stream, counts, entries)
            self._done.add("collectives")
            axis = stream.axis or "unnamed"
            yield make_finding(
                GuardCheck.COLLECTIVES,
                f"{axis} group ({','.join(map(str, stream.ranks))})",
                next(iter(records.values())).step,
                stream.ranks,
                found.describe(axis),
                rank=found.find_odd(),
                code=Cause.COLLECTIVES,
            )
            return


def _make_member_finding(
    step: int, ranks: tuple[int, ...], names: Sequence[str], which: Literal["missing", "replaced", "idle"]
) -> Finding:
    facts, error = MemberFacts(which=which, others=tuple(names[1:])), float(len(names))
    return make_finding(ScriptCheck.PARAMETERS, names[0], step, ranks, facts, error=error, rank=ranks[0])


def find_lagging(records: Mapping[int, StepRecord]) -> Finding | None:
    """Return a finding if a rank has run more backward passes than another for as many optimizer steps."""
    counts = {rank: record.num_backward for rank, record in records.items()}
    most, least = max(counts, key=lambda rank: counts[rank]), min(counts, key=lambda rank: counts[rank])
    number = sum(call.name == "backward" for call in records[least].calls)
    more = counts[most] - counts[least]
    if not more or not number or more % number:
        return None
    step = records[least].step
    site = next((call.site for call in records[least].calls if call.name == "optimizer step"), "")
    rule = CallRule.SKIPPED_STEP
    facts = CallFacts(rule=rule, site=site, expected=counts[least], actual=counts[most])
    ranks = tuple(sorted((most, least)))
    return make_finding(ScriptCheck.CALLS, rule.value, step, ranks, facts, error=float(more), rank=most)


def _has_backward(record: StepRecord) -> bool:
    return any(call.name == "backward" for call in record.calls)


def _stream(group: GroupLine) -> Stream:
    return Stream(group.name, group.ranks, group.axis, group.is_message)


def _key_of(finding: Finding) -> object:
    """Return a key that is equal for equivalent findings."""
    if isinstance(finding.facts, RecomputedFacts):
        return finding.check, finding.kind, tuple(term.name for term in finding.facts.wrong_terms)
    return finding.check, finding.tensor


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


def add_sites(
    finding: Finding, records: Mapping[int, StepRecord], headers: Mapping[int, RankHeader]
) -> Finding:
    """Return a finding with the call sites that its check is about, the most important one first."""
    record = records.get(finding.rank)
    if record is None or finding.sites:
        return finding
    used = _find_use(finding, headers.get(finding.rank))
    sites = list_sites(_choose(finding), record.calls, data=record.data_site, used=used)
    return finding.model_copy(update={"sites": sites})


def _choose(finding: Finding) -> tuple[str, ...]:
    if isinstance(finding.facts, NonfiniteFacts) and finding.facts.what == "output":
        return USED, DATA
    cause = finding.facts.cause if isinstance(finding.facts, DriftFacts) else None
    if cause is not None and (cause.module or cause.kind == "rows"):
        return (USED if cause.module else DATA), BACKWARD
    chosen: Mapping[str, tuple[str, ...]] = {
        GuardCheck.REPLICAS: (STEP, BACKWARD, USED),
        GuardCheck.EXPERTS: (USED,),
        ScriptCheck.COPIES: (USED,),
        GuardCheck.TOKENS: (DATA,),
        GuardCheck.SAME_WORK: (DATA,),
        GuardCheck.NORM: (CLIP, STEP) if _is_of_torch(finding) else (STEP,),
        GuardCheck.UPDATE: (STEP, USED),
        GuardCheck.FINITE: (BACKWARD, USED),
        ScriptCheck.PARAMETERS: (STEP, USED),
        CheckName.GRADIENT: (BACKWARD, USED),
    }
    return chosen.get(finding.check, ())


def _is_of_torch(finding: Finding) -> bool:
    return getattr(finding.facts, "source", "") == "norm"


def _find_use(finding: Finding, header: RankHeader | None) -> str:
    """Return where the script calls the module of a tensor, or the module that the finding names."""
    tensors = () if header is None else header.tensors
    own = (line.site for line in tensors if line.name == finding.tensor and line.site)
    cause = finding.facts.cause if isinstance(finding.facts, DriftFacts) else None
    module = cause.module if cause is not None and cause.module else finding.tensor
    inner = (line.site for line in tensors if line.name.rpartition(".")[0] == module and line.site)
    return next(inner, "") or next(own, "")
