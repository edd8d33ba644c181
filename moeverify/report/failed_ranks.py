"""Reports of failed ranks, folded: ranks with the same state and stack are listed once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from moeverify.results.run import CaseResult, RankReport

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_INNERMOST_FIRST = re.compile(r"most recent call first|^ *File \".*\", line \d+ in ", re.MULTILINE)
_REFUSED = "\nmoeverify.errors.CaseError: "  # starts the last line of a traceback; the problems follow it
_PREFIX = re.compile(r"\[rank\d+\]:?\s?", re.IGNORECASE)


@dataclass(frozen=True)
class RankGroup:
    """Ranks with one state and one stack; `summaries` and `collectives` hold (text, ranks) pairs."""

    state: str
    ranks: tuple[int, ...]
    summaries: tuple[tuple[str, tuple[int, ...]], ...]
    collectives: tuple[tuple[str, tuple[int, ...]], ...]
    stack: str


def group_ranks(reports: Sequence[RankReport]) -> list[RankGroup]:
    """Group reports by state and stack: original failures first, then small groups before large ones."""
    groups: dict[tuple[str, str], list[RankReport]] = {}
    for report in sorted(reports, key=lambda report: report.rank):
        groups.setdefault((report.state, _normalize(report.stack)), []).append(report)
    folded = [
        RankGroup(
            state=members[0].state,
            ranks=tuple(member.rank for member in members),
            summaries=_fold([(member.rank, member.summary) for member in members]),
            collectives=_fold([(member.rank, member.last_collective) for member in members]),
            stack=members[0].stack.strip("\n"),
        )
        for members in groups.values()
    ]
    return sorted(folded, key=lambda group: (_order_state(group.state), len(group.ranks), group.ranks))


def _order_state(state: str) -> int:
    """Return the sort key of a state: ranks that failed by themselves precede ranks that waited."""
    order = ("raised", "killed", "lost", "hung", "stopped")
    return order.index(state) if state in order else len(order)


def _normalize(stack: str) -> str:
    """Return the stack without details that vary between ranks, such as addresses and rank prefixes."""
    return _PREFIX.sub("", _ADDRESS.sub("0x", stack)).strip()


def _fold(pairs: list[tuple[int, str]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return each nonempty text once, with the ranks that reported it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in pairs:
        if text.strip():
            ranks_of.setdefault(text.strip(), []).append(rank)
    return tuple((text, tuple(ranks)) for text, ranks in ranks_of.items())


def find_problems(reports: Sequence[RankReport]) -> list[str]:
    """Return the problems of a case that the ranks rejected; empty if they failed in another way."""
    for report in sorted(reports, key=lambda report: report.rank):
        _, marked, problems = report.stack.rpartition(_REFUSED)
        if marked and report.state == "raised":
            return problems.strip().splitlines()
    return []


def find_reason(case: CaseResult) -> str:
    """Return in one line why a case has no verdict; empty if it has one and states no reason."""
    folded = [text for group in group_ranks(case.rank_reports) for text, _ in group.summaries]
    told = [*find_problems(case.rank_reports), case.reason, *folded]
    return next((text.splitlines()[0] for text in told if text.strip()), "")


def cut_stack(stack: str, num_lines: int) -> tuple[str, int]:
    """Return the innermost part of a stack, and the number of omitted lines.

    Python's tracebacks have the innermost frame last; stacks written by faulthandler have it first. Up to
    two lines beyond `num_lines` are kept, because the note about their omission takes as much room.
    """
    lines = stack.splitlines()
    left_out = len(lines) - num_lines
    if left_out <= 2:
        return stack, 0
    kept = lines[:num_lines] if _INNERMOST_FIRST.search(stack) else lines[left_out:]
    return "\n".join(kept), left_out
