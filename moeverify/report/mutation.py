"""Results of mutation testing: counts and rates for the console, a Markdown page and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from moeverify.report.markdown import make_markdown_table
from moeverify.report.words.cause import describe_where
from moeverify.results.benchmark_rows import lower_bound
from moeverify.results.mutation import MutantRow, Outcome

_KILLED: tuple[Outcome, ...] = ("detected", "crashed", "hung")
_OTHERS: tuple[Outcome, ...] = ("not executed", "not run", "no bug", "equivalent")


def summarize_mutants(rows: Sequence[MutantRow]) -> list[str]:
    """Return a Markdown table of the counts as lines."""
    outcomes = [row.outcome for row in rows]
    shown: tuple[Outcome, ...] = (*_OTHERS, *_KILLED, "survived")
    counts = (str(outcomes.count(each)) for each in shown)
    return make_markdown_table(("mutants", *shown), [(str(len(rows)), *counts)]).split("\n")


def describe_rates(rows: Sequence[MutantRow]) -> list[str]:
    """Return sentences on the share of mutants killed, and of those that a loss curve shows."""
    ran = [row for row in rows if row.outcome in (*_KILLED, "survived")]
    seen = [row for row in ran if row.outcome == "detected"]
    return [
        _rate("killed", sum(row.outcome in _KILLED for row in ran), len(ran), "that can make a difference"),
        _rate("seen by losses at 1e-3", sum(row.loss_curve for row in seen), len(seen), "detected"),
        _rate(
            "seen by losses and gradient norm at 1e-3",
            sum(row.loss_and_norm for row in seen),
            len(seen),
            "detected",
        ),
    ]


def describe_left_out(rows: Sequence[MutantRow], precision: str, layouts: Sequence[str]) -> list[str]:
    """Return sentences on omissions in a precision: mutants that are no bugs in it, and layouts."""
    mutants = [row.name for row in rows if row.outcome == "no bug"]
    lines = [f"no bug in {precision}, and not run: {', '.join(mutants)}"] if mutants else []
    return [*lines, *([f"layouts that {precision} does not know: {', '.join(layouts)}"] if layouts else [])]


def write_json(rows: Sequence[MutantRow], environment: Mapping[str, str], command: str) -> str:
    """Return the rows as JSON, with the command and environment that produced them."""
    content = {
        "command": command,
        "environment": dict(environment),
        "mutants": [row.model_dump(mode="json", exclude={"finding"}) for row in rows],
    }
    return json.dumps(content, indent=1) + "\n"


def _rate(name: str, hits: int, total: int, of: str) -> str:
    rate, bound = hits / max(total, 1), lower_bound(hits, max(total, 1))
    return f"{name}: {hits} of {total} {of} ({rate:.0%}; at least {bound:.0%} at 95 % confidence)"


def write_mutants(
    rows: Sequence[MutantRow], environment: Mapping[str, str], command: str, counts: tuple[int, int]
) -> str:
    """Return the Markdown page: counts, rates, and one row per mutant, survivors first.

    `counts` are the number of all mutants, and of the mutants that
    no layout executes.
    """
    known = ", ".join(f"{name} {environment[name]}" for name in ("torch", "python", "device", "cores"))
    lines = [
        "# Bugs made by machine",
        "",
        f"Made by `{command}` with {known}.",
        f"There are {counts[0]} mutants; {counts[1]} change code that none of the layouts here executes, and of the "
        f"others {len(rows)} were chosen by the seed and run.",
        "[How mutants are made](../diagnosis.md#mutants).",
        "",
        *summarize_mutants(rows),
        "",
        *(f"- {line}" for line in describe_rates(rows)),
        "",
        make_markdown_table(_HEADERS, [_make_row(row) for row in sorted(rows, key=_order)]),
    ]
    return "\n".join(lines) + "\n"


_HEADERS = ("mutant", "change", "layouts", "outcome", "reported")


def _order(row: MutantRow) -> tuple[int, str]:
    outcomes = ("survived", "detected", "hung", "crashed", "equivalent", "no bug", "not executed", "not run")
    return outcomes.index(row.outcome), row.name


def _make_row(row: MutantRow) -> tuple[str, ...]:
    return (
        f"`{row.name}` {row.file}:{row.line}",
        f"`{_shorten(row.before)}` -> `{_shorten(row.after)}`",
        ", ".join(row.cases),
        row.outcome,
        describe_result(row),
    )


def describe_result(row: MutantRow) -> str:
    """Return the diagnosis of a mutant, or how its ranks ended."""
    if row.outcome == "detected" and row.finding is not None:
        where = describe_where(row.finding)
        place = f"{row.finding.tensor} | {where}" if where else row.finding.tensor
        return f"`{place}`: {row.said}"
    return _shorten(row.reason)


def _shorten(text: str) -> str:
    one = " ".join(text.split())
    return one if len(one) <= 100 else f"{one[:96]} ..."
