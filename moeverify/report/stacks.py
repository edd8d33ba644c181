"""Reports of failed ranks, folded: ranks that stand in the same place are listed once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from moeverify.results.run import RankReport

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_INNERMOST_FIRST = re.compile(r"most recent call first|^ *File \".*\", line \d+ in ", re.MULTILINE)
_REFUSED = "\nmoeverify.errors.CaseError: "  # the last line of a traceback, and the problems
_PREFIX = re.compile(r"\[rank\d+\]:?\s?", re.IGNORECASE)


@dataclass(frozen=True)
class RankGroup:
    """Ranks in one state with one stack; `summaries` and `collectives` hold (text, ranks), each text once."""

    state: str
    ranks: tuple[int, ...]
    summaries: tuple[tuple[str, tuple[int, ...]], ...]
    collectives: tuple[tuple[str, tuple[int, ...]], ...]
    stack: str


def group_ranks(reports: Sequence[RankReport]) -> list[RankGroup]:
    """Return the reports by state and stack: what failed by itself first, the odd one before the crowd."""
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
    """Return the place of a state: what failed by itself stands before what only waited or was stopped."""
    order = ("raised", "killed", "lost", "hung", "stopped")
    return order.index(state) if state in order else len(order)


def _normalize(stack: str) -> str:
    """Return the stack without what differs from rank to rank though the place is the same."""
    return _PREFIX.sub("", _ADDRESS.sub("0x", stack)).strip()


def _fold(pairs: list[tuple[int, str]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return each text once with the ranks that say it; nothing for empty texts."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in pairs:
        if text.strip():
            ranks_of.setdefault(text.strip(), []).append(rank)
    return tuple((text, tuple(ranks)) for text, ranks in ranks_of.items())


def find_problems(reports: Sequence[RankReport]) -> list[str]:
    """Return what is wrong with a case that the ranks have refused: none where they failed in another way."""
    for report in sorted(reports, key=lambda report: report.rank):
        _, marked, problems = report.stack.rpartition(_REFUSED)
        if marked and report.state == "raised":
            return problems.strip().splitlines()
    return []


def cut_stack(stack: str, num_lines: int) -> tuple[str, int]:
    """Return the end of a stack where the rank stopped, and how many lines were left out.

    Python's tracebacks have it last, stacks that faulthandler wrote have it first. A line or two more than
    asked for are kept, since saying that they are left out takes as much room.
    """
    lines = stack.splitlines()
    left_out = len(lines) - num_lines
    if left_out <= 2:
        return stack, 0
    kept = lines[:num_lines] if _INNERMOST_FIRST.search(stack) else lines[left_out:]
    return "\n".join(kept), left_out
