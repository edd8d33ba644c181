"""A run as one self-contained HTML page: no external fonts, images or scripts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from moeverify.errors import FormatError
from moeverify.report import operator_page
from moeverify.report.explanation import number_findings
from moeverify.report.failed_ranks import group_ranks
from moeverify.report.files import write_atomically
from moeverify.report.formats.json import find_run_file
from moeverify.report.formats.perfetto import format_address
from moeverify.report.matrix import find_matrices
from moeverify.report.next_steps import NOT_KEPT, Kept, advise
from moeverify.report.numbers import format_count
from moeverify.report.operator_file import find_table, read
from moeverify.report.page import render_page
from moeverify.report.pictures.picture import Picture, format_svg
from moeverify.report.pictures.registry import draw_case, draw_run
from moeverify.report.sorting import count_tensors, count_verdicts, find_worst_check, order_findings
from moeverify.results.finding import MAX_CONCLUSIVE, Finding
from moeverify.results.run import CaseResult, RunResult

# Limits that keep the page of 100 failed cases below 2 MB; the JSON contains everything.
_MOST_STATIC_CASES = 300
_MOST_FAILURES = 20
_MOST_SECTIONS = 60
_MOST_PICTURED = 5  # cases: the pictures of one take about a second and 200 kB
_MOST_ORIGINS = 100  # findings shown in full, in all sections together, at most _MOST_OF_CASE each
_MOST_OF_CASE = 20
_MOST_ROWS = 1000  # findings shown as rows, in all sections together


def write(run: RunResult, path: Path) -> None:
    """Write the run's page to `path` atomically, and existing operator tables as pages beside it.

    Raises: OSError when writing fails.
    """
    operators = _write_operators(run, path)
    write_atomically(path, format_page(run, operators, kept=_find_kept(run, path)))


def _find_kept(run: RunResult, path: Path) -> Kept:
    """Return the folder of the run, if it still has the operators of a case."""
    tables = (find_table(case, path) for case in run.cases if case.has_failed)
    found = next((table.parents[1] for table in tables if table is not None), None)
    return NOT_KEPT if found is None or not find_run_file(found).is_file() else Kept(found)


def _write_operators(run: RunResult, path: Path) -> dict[str, str]:
    """Write the operator page of each pictured case; return the file names by case name."""
    names: dict[str, str] = {}
    if path.exists() and not path.is_file():
        return names
    for case in [each for each in run.cases if each.has_failed][:_MOST_PICTURED]:
        table = find_table(case, path)
        if table is not None:
            page = path.with_name(f"{path.stem}.{table.name.partition('.')[0]}.operators.html")
            with suppress(FormatError):  # a damaged operator file only loses its link
                operator_page.write(read(table), page)
                names[case.name] = page.name
    return names


def format_page(
    run: RunResult, operators: Mapping[str, str] | None = None, *, kept: Kept = NOT_KEPT, version: str = ""
) -> str:
    """Return the page: failures, a table of all cases, then details of cases.

    `operators` maps the names of cases to the addresses of their operator pages. `kept` is where the run is
    stored. A page with a `version` is live: it asks its server for newer versions.
    """
    entries = _make_entries(run, operators or {}, kept)
    failed = [entry for entry in entries if entry.case.has_failed]
    is_long = len(entries) > _MOST_STATIC_CASES
    launches = {"launches": run.launches} if run.launches else {}
    return render_page(
        "run.html",
        {**run.environment, **launches},
        version=version,
        run=run,
        title="running" if run.waiting else run.verdict,
        max_conclusive=MAX_CONCLUSIVE,
        counts=count_verdicts(run),
        num_tensors=sum(entry.tensors for entry in entries),
        matrices=find_matrices(run.cases),
        run_pictures=[(each, Markup(format_svg(each, name))) for name, each in draw_run(run)],
        failed=failed[:_MOST_FAILURES],
        num_more_failed=max(0, len(failed) - _MOST_FAILURES),
        is_long=is_long,
        cases=sorted(entries, key=lambda entry: not entry.case.has_failed) if is_long else entries,
        detailed=[entry for entry in entries if entry.anchor],
    )


def _make_entries(run: RunResult, operators: Mapping[str, str], kept: Kept) -> list[_Entry]:
    """Return all cases in order. Failed cases get a detailed section, then others up to a limit."""
    positions = sorted(range(len(run.cases)), key=lambda at: not run.cases[at].has_failed)
    numbers: dict[int, int] = {}
    for item in reversed(number_findings(run)):
        numbers[id(item.case)] = item.number
    # If there are many cases, the passed ones are covered by their rows.
    with_section = set(positions[:_MOST_SECTIONS])
    pictured = set(positions[:_MOST_PICTURED])
    num_failed = max(1, sum(run.cases[at].has_failed for at in with_section))
    return [
        _Entry(
            case,
            anchor=f"case-{at + 1}" if at in with_section else "",
            is_pictured=at in pictured,
            command=run.command,
            number=numbers.get(id(case), 1),
            most_origins=min(_MOST_OF_CASE, max(1, _MOST_ORIGINS // num_failed)),
            most_rows=_MOST_ROWS // num_failed,
            operators=quote(operators.get(case.name, "")),
            kept=kept,
        )
        for at, case in enumerate(run.cases)
    ]


@dataclass(frozen=True)
class _Entry:
    """One case with the values shown by the templates; `anchor` is the id of its section, if any.

    `operators` is the address of its operator page, if any, and `kept` the place of the run.
    """

    case: CaseResult
    anchor: str
    is_pictured: bool
    command: str
    number: int
    most_origins: int
    most_rows: int
    operators: str = ""
    kept: Kept = NOT_KEPT

    @cached_property
    def tensors(self) -> int:
        return count_tensors(self.case)

    @cached_property
    def worst(self) -> object:
        return find_worst_check(self.case)

    @cached_property
    def groups(self) -> object:
        return group_ranks(self.case.rank_reports)

    @cached_property
    def findings(self) -> list[Finding]:
        return order_findings(self.case.findings)

    @cached_property
    def origins(self) -> list[Finding]:
        """Return the findings shown in full: the first ones that follow from no other."""
        return [finding for finding in self.findings if not finding.follows][: self.most_origins]

    @cached_property
    def others(self) -> list[Finding]:
        """Return the findings shown as one row each."""
        return self._rest[: self.most_rows]

    @property
    def num_left_out(self) -> int:
        return len(self._rest) - len(self.others)

    @cached_property
    def _rest(self) -> list[Finding]:
        shown = set(map(id, self.origins))
        return [finding for finding in self.findings if id(finding) not in shown]

    @property
    def others_title(self) -> str:
        follow = all(finding.follows for finding in self.others)
        return f"{format_count(len(self.others), 'finding')} {'that follow from these' if follow else 'more'}"

    @property
    def next_steps(self) -> list[tuple[str, str]]:
        steps = advise(self.case, self.command, self.kept, self.number)
        return [
            (command, purpose) for command, purpose in steps if not command.startswith("moeverify report ")
        ]

    @cached_property
    def pictures(self) -> list[tuple[str, Picture, Markup]]:
        """Return (name, picture, SVG) triples; matplotlib has escaped the text inside the SVG."""
        if not self.is_pictured:
            return []
        drawn = draw_case(self.case)
        return [(name, each, Markup(format_svg(each, f"{self.anchor}-{name}"))) for name, each in drawn]

    @property
    def trace(self) -> str:
        return format_address(self.case)

    @property
    def is_without_pictures(self) -> bool:
        return not self.is_pictured and self.case.has_failed
