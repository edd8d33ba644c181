"""An undecided case in every format: never a pass, with the share that was decided."""

from __future__ import annotations

import csv
import io
import json
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from moeverify.report.formats.csv import format_csv
from moeverify.report.formats.html import format_page
from moeverify.report.formats.json import format_json
from moeverify.report.formats.junit import format_junit
from moeverify.report.formats.markdown import format_markdown
from moeverify.report.github import annotate_run
from moeverify.report.text import render_run
from moeverify.results.decided import Decided
from moeverify.results.finding import CheckResult

WHY = "gradient: 3 of 58 tensors decided at 20 %; in the others an error below 322 % may not have been seen"
CHECK = CheckResult(
    name="gradient", verdict="pass", tensors=58, decided=Decided(tensors=58, decided=3, limit=3.22, worst=6.0)
)


@pytest.fixture
def run(make_run: Any, make_case: Any) -> Any:
    open_one = make_case("open", "undecided", reason=WHY, checks=(CHECK,))
    return make_run(make_case("good"), open_one, verdict="undecided")


@pytest.mark.parametrize("quiet", [False, True])
def test_the_text_says_what_was_decided(run: Any, print_at: Any, quiet: bool) -> None:
    text = print_at(lambda console: render_run(run, console, quiet=quiet), width=120, terminal=False)
    assert WHY in " ".join(text.split())
    assert text.splitlines()[-1].startswith("UNDECIDED  2 cases: 1 pass, 1 undecided")


def test_json_has_the_share(run: Any) -> None:
    told = json.loads(format_json(run))
    _, case = told["cases"]
    assert (told["verdict"], case["verdict"], case["reason"]) == ("undecided", "undecided", WHY)
    assert case["checks"][0]["decided"] == {"tensors": 58, "decided": 3, "limit": 3.22, "worst": 6.0}


def test_junit_has_a_failure_of_its_own_type(run: Any) -> None:
    root = ET.fromstring(format_junit(run))
    assert root.attrib["failures"] == "1"
    (failure,) = root.iter("failure")
    assert (failure.attrib["type"], failure.attrib["message"]) == ("undecided", WHY)


def test_junit_skips_a_case_that_may_be_undecided(run: Any) -> None:
    root = ET.fromstring(format_junit(run.model_copy(update={"allows_undecided": True})))
    assert root.attrib["failures"] == "0"
    (skipped,) = root.iter("skipped")
    assert (root[0].attrib["skipped"], skipped.attrib["message"]) == ("1", f"undecided: {WHY}")


def test_the_page_and_the_summary_do_not_say_that_nothing_differs(run: Any) -> None:
    page = format_page(run)
    assert WHY in page
    assert "Nothing differs" not in page
    assert f"open is undecided: {WHY}" in format_markdown(run)


def test_the_table_of_checks_has_the_number_of_decided_tensors(run: Any) -> None:
    row = list(csv.DictReader(io.StringIO(format_csv(run))))[-1]
    assert (row["case"], row["verdict"], row["reason"]) == ("open", "undecided", WHY)
    assert (row["check"], row["tensors"], row["decided"]) == ("gradient", "58", "3")


@pytest.mark.parametrize(("allowed", "level"), [(False, "error"), (True, "warning")])
def test_github_annotates_an_undecided_case(run: Any, allowed: bool, level: str) -> None:
    (line,) = annotate_run(run.model_copy(update={"allows_undecided": allowed}))
    assert line.startswith(f"::{level} ")
    assert "open undecided" in line
