"""Detection of ranks that see the same rows although they should not. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

from moeverify.results.finding import Finding, make_finding
from moeverify.results.guard import GuardCheck, SameWorkFacts, TokenFacts
from moeverify.scripts.guard.lines import RankHeader, StepRecord, exchange_activations

_INPUT = "input"
_TIMES = 2  # sampled steps in a row: a sampler may pad the last batch of an epoch with rows of other ranks
_SHARE = 0.5  # of a rank's rows: random draws with replacement may coincide
_FEWEST_PASSES = 4  # with one shift, each with another state of the generators
_SMALL = 16  # elements: averaging a loss or a norm for a log is no shared work


@dataclass
class TokenRule:
    """A check for data-parallel ranks with common rows, and for ranks that redundantly do the same work."""

    headers: Mapping[int, RankHeader]
    _streaks: dict[tuple[int, int], int] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)
    # (row, state of the generators) -> number of the forward pass, by rank
    _passes: dict[int, dict[tuple[int, int], int]] = field(default_factory=dict)

    def find(self, records: Mapping[int, StepRecord]) -> list[Finding]:
        """Return findings for data-parallel ranks with common rows, and for ranks with the same work."""
        rows = {
            rank: Counter(row for each in record.rows for row in each) for rank, record in records.items()
        }
        shared: dict[tuple[int, int], int] = {}
        for pair in combinations(sorted(rows), 2):
            seen = [rows[rank] for rank in pair]
            number = (seen[0] & seen[1]).total()
            least = min(each.total() for each in seen)
            is_common = least > 0 and number >= _SHARE * least
            self._streaks[pair] = self._streaks.get(pair, 0) + 1 if is_common else 0
            if self._streaks[pair] >= _TIMES:
                shared[pair] = number
        step = next(iter(records.values())).step
        tokens = [
            pair
            for pair in shared
            if pair[1] in self.headers[pair[0]].data_ranks or self._reduce_the_same(pair, records)
        ]
        findings = []
        if tokens and "tokens" not in self._done:
            self._done.add("tokens")
            ranks = tuple(sorted({rank for pair in tokens for rank in pair}))
            one, two = max(tokens, key=lambda pair: shared[pair])
            total = min(rows[one].total(), rows[two].total())
            facts = TokenFacts(num_rows=total, num_shared=shared[one, two], num_steps=_TIMES)
            findings.append(
                make_finding(GuardCheck.TOKENS, _INPUT, step, ranks, facts, error=facts.num_shared / total)
            )
        if "tokens" not in self._done and (shifted := self._find_shifted(records)):
            self._done.add("tokens")
            findings += shifted
        idle = [
            pair
            for pair in shared
            if pair not in tokens and rows[pair[0]] == rows[pair[1]] and self._do_the_same(pair, records)
        ]
        if idle and "work" not in self._done:
            self._done.add("work")
            ranks = tuple(sorted({rank for pair in idle for rank in pair}))
            header = self.headers[idle[0][0]]
            axis = next(
                (axis for axis, members in header.groups if axis and set(idle[0]) <= set(members)), ""
            )
            work = SameWorkFacts(axis=axis, num_tensors=len(header.tensors), num_steps=_TIMES)
            findings.append(make_finding(GuardCheck.SAME_WORK, _INPUT, step, ranks, work))
        return findings

    def _find_shifted(self, records: Mapping[int, StepRecord]) -> list[Finding]:
        """Return a finding if data-parallel ranks draw the same rows from the same generators at other times."""
        for rank, record in records.items():
            own = self._passes.setdefault(rank, {})
            for each in record.passes:
                own.update({(each.row, state): each.number for state in each.states})
        for one, two in combinations(sorted(self._passes), 2):
            if two not in self.headers[one].data_ranks:
                continue
            mine, theirs = self._passes[one], self._passes[two]
            # A generator that draws nothing has one state in all passes, and is no evidence.
            states: dict[int, set[int]] = {}
            for row, state in mine.keys() & theirs.keys():
                states.setdefault(theirs[row, state] - mine[row, state], set()).add(state)
            shift, number = max(
                ((shift, len(seen)) for shift, seen in states.items()),
                key=lambda item: item[1],
                default=(0, 0),
            )
            if shift and number >= _FEWEST_PASSES:
                step = next(iter(records.values())).step
                facts = TokenFacts(num_rows=number, num_shared=number, num_steps=number, shift=shift)
                return [make_finding(GuardCheck.TOKENS, _INPUT, step, (one, two), facts)]
        return []

    def _reduce_the_same(self, pair: tuple[int, int], records: Mapping[int, StepRecord]) -> bool:
        """Return whether two ranks compute the same losses alone, and exchange gradients."""
        losses = [records[rank].losses for rank in pair]
        return (
            bool(losses[0])
            and losses[0] == losses[1]
            and not exchange_activations(pair, records)
            and self._are_equal(pair, records)
            and self._find_largest(pair, records) > _SMALL
        )

    def _do_the_same(self, pair: tuple[int, int], records: Mapping[int, StepRecord]) -> bool:
        """Return whether two ranks have equal weights and exchange only small tensors."""
        is_known = records[pair[0]].is_traced
        return is_known and self._are_equal(pair, records) and self._find_largest(pair, records) <= _SMALL

    def _are_equal(self, pair: tuple[int, int], records: Mapping[int, StepRecord]) -> bool:
        """Return whether two ranks have the same parameters with equal values."""
        one, two = ([(each.name, each.region) for each in self.headers[rank].tensors] for rank in pair)
        return one == two and records[pair[0]].ended == records[pair[1]].ended

    def _find_largest(self, pair: tuple[int, int], records: Mapping[int, StepRecord]) -> int:
        groups = records[pair[0]].groups
        return max((group.largest for group in groups if set(pair) <= set(group.ranks)), default=0)
