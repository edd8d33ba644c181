"""The benchmarks' tables in Markdown: every row has as many cells as the head, whatever its contents."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from moeverify.report.faults import render_faults, write_clean, write_faults, write_json
from moeverify.report.markdown import make_markdown_table
from moeverify.results.benchmark_rows import CleanRow, FaultRow

ENVIRONMENT = {"torch": "2.13", "python": "3.12", "device": "cpu", "cores": "2"}


def split_rows(text: str) -> list[list[str]]:
    """Return the cells of a table as a reader of Markdown sees them."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [re.split(r"(?<!\\)\|", row.strip("|")) for row in rows]


def test_what_a_cell_holds_stays_in_it() -> None:
    rows = [("a | b", "two\nlines", ""), ("|", "1e-3", "x" * 300)]
    table = split_rows(make_markdown_table(("one", "two | three", "four"), rows))
    assert {len(row) for row in table} == {3}
    assert [cell.strip().replace("\\|", "|") for cell in table[2]] == ["a | b", "two lines", ""]
    assert [cell.strip().replace("\\|", "|") for cell in table[3]] == ["|", "1e-3", "x" * 300]
    assert len(make_markdown_table(("a", "b", "c"), rows).splitlines()[2]) < 40, "cells are not padded"


@pytest.fixture
def rows(make_finding: Any) -> list[FaultRow]:
    fields = {"source": "a/b #1 | c", "is_moe": True, "loss_curve": False}
    missed = {"detected": False, "located": False, "cause_named": False, "line_shown": False}
    found = {"detected": True, "located": True, "cause_named": True}
    return [
        FaultRow(
            number="A01",
            title="too | large",
            verdict="mismatch",
            finding=make_finding(),
            loss_and_norm=True,
            line_shown=True,
            **fields,
            **found,
        ),
        FaultRow(
            number="A02",
            title="before",
            verdict="mismatch",
            finding=make_finding(step=-1, where=""),
            **fields,
            **found,
        ),
        FaultRow(
            number="A03", title="missed", verdict="pass", reason="nothing | differs", **fields, **missed
        ),
    ]


def test_the_page_of_the_faults(rows: list[FaultRow]) -> None:
    page = write_faults(rows, ENVIRONMENT, "moeverify faults run")
    table = [[cell.strip() for cell in row] for row in split_rows(page)]
    assert {len(row) for row in table} == {10}
    assert [row[7:9] for row in table[2:]] == [["blind", "sees it"], ["blind", "blind"], ["blind", "blind"]]
    assert [row[6] for row in table[2:]] == ["0", "init", ""]
    assert [row[2] for row in table[2:]] == ["yes", "yes", "**no**"]
    assert table[2][9].startswith(
        "`blocks.1.moe.experts.12.up.weight \\| backward of blocks.1.moe.combine`: "
    )
    assert table[4][9] == "missed: nothing \\| differs"
    assert "detected: 2 of 3" in page
    assert "seen by losses and gradient norm at 1e-3: 1 of 3" in page


def test_the_rows_in_json_have_all_marks_and_no_finding(rows: list[FaultRow]) -> None:
    written = json.loads(write_json(rows, ENVIRONMENT, "moeverify faults run"))
    assert (written["command"], written["environment"]) == ("moeverify faults run", ENVIRONMENT)
    assert [(each["number"], each["cause_named"], each["line_shown"]) for each in written["faults"]] == [
        ("A01", True, True),
        ("A02", True, False),
        ("A03", False, False),
    ]
    assert not any("finding" in each for each in written["faults"])


def test_the_table_on_the_console(rows: list[FaultRow], print_at: Any) -> None:
    text = print_at(lambda console: render_faults(rows, console), width=160, terminal=False)
    assert re.search(r"^A01 +yes +yes +yes +yes +0 +blind +sees it ", text, re.MULTILINE)
    assert re.search(
        r"^A03 +NO +NO +NO +NO +- +blind +blind +missed: nothing \| differs$", text, re.MULTILINE
    )


def test_what_a_wider_precision_alone_has_shown_stands_beside_the_narrow_result(
    rows: list[FaultRow], print_at: Any
) -> None:
    rows[0] = rows[0].model_copy(update={"found_in": "float64"})
    text = print_at(lambda console: render_faults(rows, console), width=200, terminal=False)
    assert re.search(
        r"^A01 +yes +yes +yes +yes +0 +blind +sees it +NO +blocks.* in float64: ", text, re.MULTILINE
    )
    assert re.search(r"^A02 +yes +yes +yes +NO +init +blind +blind +yes ", text, re.MULTILINE)
    assert "detected: 2 of 3" in text
    assert "alone: detected 1, located 1, cause named 1 of 3" in text
    page = write_faults(rows, ENVIRONMENT, "moeverify faults run")
    assert [row[9].strip() for row in split_rows(page)[2:]] == ["**no**", "yes", "**no**"]
    assert "alone: detected 1, located 1, cause named 1 of 3" in page


def test_the_page_of_the_clean_matrix() -> None:
    rows = [
        CleanRow(name=name, group=group, verdict=verdict, worst=0.5, tensors=3, detail="x | y")
        for name, group, verdict in (("a", "g | h", "pass"), ("b", "g | h", "mismatch"), ("c", "i", "pass"))
    ]
    page = write_clean(rows, ENVIRONMENT, "moeverify faults clean")
    table = [[cell.strip() for cell in row] for row in split_rows(page)]
    assert {len(row) for row in table} == {7}
    assert [row[:3] for row in table[2:]] == [["g \\| h", "2", "1"], ["i", "1", "0"]]
    assert "- b: mismatch: x | y" in page
