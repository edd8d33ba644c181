"""The operators of both sides as an HTML page, whose script renders only the visible rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from markupsafe import Markup

from moeverify.report.files import write_atomically
from moeverify.report.page import render_page
from moeverify.report.sanitize import clean
from moeverify.results.operator_table import Compared, Operator, OperatorList, OperatorTable, Outcome, Phase

OUTCOMES: Sequence[Outcome] = get_args(Outcome)
PHASES: Sequence[Phase] = get_args(Phase)

_MOST_CAUSES = 8

WORDS: Mapping[Outcome, str] = {
    "match": "match",
    "multiple": "a multiple",
    "differs": "differ",
    "shape": "of another shape",
    "alone": "without counterpart",
    "uncompared": "not compared",
}


def write(table: OperatorTable, path: Path) -> None:
    """Write the page to `path` atomically.

    Raises: OSError when writing fails.
    """
    write_atomically(path, format_page(table))


def format_page(table: OperatorTable) -> str:
    """Return the page as HTML."""
    text = json.dumps(pack(table), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    counts = count_outcomes(table)
    return render_page(
        "operators.html",
        {"step": str(table.step), "bound of a match": f"{table.bound:.3g}"},
        script="operators",
        table=table,
        counts=[(each, WORDS[each], counts[each]) for each in OUTCOMES if counts[each]],
        phases=[each for each in PHASES if any(_has_phase(table, each))],
        outcomes=[(each, WORDS[each]) for each in OUTCOMES],
        data=Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")),
    )


def count_outcomes(table: OperatorTable, phase: Phase | None = None) -> Counter[Outcome]:
    """Return how many operators have each outcome, over all ranks; `phase` restricts to one phase."""
    return Counter(
        each.outcome
        for listed, compared in zip(table.actual, table.compared, strict=True)
        for op, each in zip(listed.operators, compared, strict=True)
        if phase is None or op.phase == phase
    )


def describe_table(table: OperatorTable) -> Iterator[str]:
    """Yield the lines of a terminal summary: outcomes per phase, and the first wrong operators."""
    for phase in PHASES:
        counts = count_outcomes(table, phase)
        if counts:
            words = ", ".join(f"{counts[each]} {WORDS[each]}" for each in OUTCOMES if counts[each])
            yield f"{phase:<9} {words}"
    for rank, place in table.causes[:_MOST_CAUSES]:
        listed = table.actual[rank]
        op = listed.operators[place]
        lines = [listed.sites[each] for each in op.sites[:1]]
        where = "".join(f", {each.file}:{each.line} in {each.function}" for each in lines)
        yield f"first wrong: operator {place} of rank {rank}, {op.name}{where}"


def _has_phase(table: OperatorTable, phase: Phase) -> Iterator[bool]:
    return (op.phase == phase for each in (*table.expected, *table.actual) for op in each.operators)


def pack(table: OperatorTable) -> dict[str, Any]:
    """Return the table in compact form for the page's script: rows of numbers, each string stored once.

    An operator is [name, phase, module, sites, results, inputs, origin, ranks, axis]. A site is [file,
    line, function, expression], a result [shape, dtype], and an input an operator index or [name]. A
    comparison is [outcome, other, other rank, place, factor, error].
    """
    strings: dict[str, int] = {}

    def intern(text: str) -> int:
        return strings.setdefault(clean(text), len(strings))

    def pack_operator(op: Operator) -> list[Any]:
        return [
            intern(op.name),
            PHASES.index(op.phase),
            intern(op.module),
            list(op.sites),
            [[list(each.shape), intern(each.dtype)] for each in op.results],
            [[intern(each)] if isinstance(each, str) else each for each in op.inputs],
            op.origin,
            list(op.ranks),
            intern(op.axis),
        ]

    def pack_list(listed: OperatorList) -> dict[str, Any]:
        return {
            "sites": [
                [intern(each.file), each.line, intern(each.function), intern(each.expression)]
                for each in listed.sites
            ],
            "operators": [pack_operator(op) for op in listed.operators],
        }

    def pack_compared(each: Compared) -> list[Any]:
        error = None if each.error is None else f"{each.error:.3g}"
        return [
            OUTCOMES.index(each.outcome),
            each.other,
            each.other_rank,
            intern(each.place),
            f"{each.factor:.6g}",
            error,
        ]

    packed = {
        "expected": [pack_list(each) for each in table.expected],
        "actual": [pack_list(each) for each in table.actual],
        "compared": [[pack_compared(each) for each in rank] for rank in table.compared],
        "causes": [list(each) for each in table.causes],
        "names": [clean(table.expected_name), clean(table.actual_name)],
        "outcomes": [[each, WORDS[each]] for each in OUTCOMES],
        "phases": list(PHASES),
    }
    return {**packed, "strings": list(strings)}
