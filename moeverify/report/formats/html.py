"""A run as one HTML page that needs nothing else: no script, no font, no image from anywhere."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from moeverify.report.files import write_atomically
from moeverify.report.finding_rows import describe_finding, name_finding, name_tensor
from moeverify.report.matrix import describe_cell, find_matrices
from moeverify.report.numbers import (
    excess,
    format_bound,
    format_count,
    format_number,
    format_ranks,
    format_seconds,
)
from moeverify.report.sanitize import clean
from moeverify.report.sorting import count_tensors, count_verdicts, find_worst_check, order_findings
from moeverify.report.stacks import group_ranks
from moeverify.report.words.run import list_notes
from moeverify.results.finding import MAX_CONCLUSIVE
from moeverify.results.run import CaseResult, RunResult

_TEMPLATES = Path(__file__).parent / "templates"
# A browser shows thousands of findings slowly and nobody reads them; the JSON has all.
_MAX_FINDINGS = 200


def write(run: RunResult, path: Path) -> None:
    """Write the run's page to `path`, completely or not at all.

    Raises: OSError when the disk refuses.
    """
    write_atomically(path, format_page(run))


def format_page(run: RunResult) -> str:
    """Return the page: the table of all cases, then for each case its checks, findings and ranks."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_clean_value,
    )
    environment.filters.update(
        number=format_number,
        bound=format_bound,
        seconds=format_seconds,
        ranks=format_ranks,
        share=_format_share,
    )
    environment.globals.update(
        count=format_count,
        name_finding=name_finding,
        name_tensor=name_tensor,
        describe_finding=describe_finding,
        describe_cell=describe_cell,
        list_notes=list_notes,
    )
    template = environment.get_template("run.html")
    return template.render(
        run=run,
        max_conclusive=MAX_CONCLUSIVE,
        counts=count_verdicts(run),
        matrices=find_matrices(run.cases),
        cases=[_Entry(position, case) for position, case in enumerate(run.cases, start=1)],
    )


class _Entry:
    """A case with what the template shows of it; `anchor` is its place on the page."""

    def __init__(self, position: int, case: CaseResult) -> None:
        self.case = case
        self.anchor = f"case-{position}"
        self.tensors = count_tensors(case)
        self.worst = find_worst_check(case)
        self.findings = order_findings(case.findings)[:_MAX_FINDINGS]
        self.num_left_out = len(case.findings) - len(self.findings)
        self.groups = group_ranks(case.rank_reports)


def _format_share(error: float, bound: float) -> str:
    """Return how much of its bound an error uses."""
    return format_number(excess(error, bound))


def _clean_value(value: object) -> object:
    """Return strings without control characters; escaping comes after."""
    return clean(value) if type(value) is str else value
