"""Writer of the operators of all ranks and the single device in the first step that differs. Rank 0 only."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from moeverify.cases.axes.describe import describe_layout
from moeverify.cases.schema import Case
from moeverify.explain.align import Alignment
from moeverify.explain.cause import OperatorCause
from moeverify.explain.explain import Explainer
from moeverify.explain.known import Known
from moeverify.explain.operator_lists import Listed, list_operators, name_value
from moeverify.explain.operator_table import LookUp, make_table
from moeverify.explain.program import Program
from moeverify.report.operator_file import write
from moeverify.results.operator_table import Compared, OperatorTable

# Fraction of the comparison's time for look-ups by content, which find values elsewhere in the program.
_LOOK_UP_SHARE = 0.5

# Time limit of the operator comparison as a fraction of the time limit of the search for causes.
_SHARE = 0.5

_BOUND = 1e-8


def keep_operators(
    case: Case,
    explainer: Explainer,
    programs: Sequence[Program],
    one: Program,
    causes: Sequence[OperatorCause],
    path: Path,
    seconds: float,
) -> str:
    """Write the operators of both sides to `path` and return its name; return "" if writing fails.

    `seconds` is the time limit of the search for causes. The comparison may take a fixed fraction of it.
    """
    try:
        write(_make_table(case, explainer, programs, one, causes, _SHARE * seconds), path)
    except Exception:  # the findings are complete without the file; the error goes to the rank's log
        traceback.print_exc()
        return ""
    return str(path)


def _make_table(
    case: Case,
    explainer: Explainer,
    programs: Sequence[Program],
    one: Program,
    causes: Sequence[OperatorCause],
    seconds: float,
) -> OperatorTable:
    step = explainer.step
    expected = list_operators(one, step)
    return make_table(
        [expected],
        [list_operators(program, step) for program in programs],
        title=case.name,
        step=step,
        names=("one device", describe_layout(case.layout)),
        seconds=seconds,
        bound=_BOUND,
        look_up=_make_look_up(explainer.alignment, expected, time.monotonic() + _LOOK_UP_SHARE * seconds),
        causes=[at for cause in causes for at in cause.ops],
    )


def _make_look_up(alignment: Alignment, expected: Listed, end: float) -> LookUp:
    """Return a function that finds a rank's value among single-device values by content, until `end`."""
    makers = {number: place for place, made in enumerate(expected.numbers) for number in made}

    def look_up(rank: int, number: int) -> Compared | None:
        at = (rank, number)
        if time.monotonic() > end or not alignment.tells(at):
            return None
        known = alignment.find(at)
        return None if known is None else _describe(alignment, known, makers)

    return look_up


def _describe(alignment: Alignment, known: Known, makers: Mapping[int, int]) -> Compared:
    """Describe the single-device elements that a value holds.

    `makers` maps each single-device value to its listed operator.
    """
    roots = [] if known.ids is None else alignment.elements.roots(known.ids)
    ranks = ", ".join(str(rank) for rank in sorted({rank for rank, _ in known.over}))
    names = [
        f"part of a sum over ranks {ranks}" if known.over else "",
        f"elements of {name_value(alignment.one, roots[0])}" if roots else "",
    ]
    return Compared(
        outcome="match" if known.scale == 1.0 else "multiple",
        other=makers.get(roots[0], -1) if roots else -1,
        place=", ".join(filter(None, names)),
        factor=known.scale,
    )
