"""A case file as a collector, and its case as a test that fails with its findings."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moeverify.cases.document import read_document
from moeverify.cases.entry import Entry
from moeverify.cases.schema import Case
from moeverify.errors import CaseError, MoeverifyError
from moeverify.pytest_plugin.session import CaseSession
from moeverify.report.console import open_console
from moeverify.report.finding_rows import name_finding
from moeverify.report.numbers import format_bound, format_excess, format_number
from moeverify.report.sorting import order_findings
from moeverify.report.text import render_run
from moeverify.results.run import CaseResult, RunResult


class CaseFile(pytest.File):
    """A case file; an invalid one fails during collection with all of its problems."""

    def collect(self) -> Iterator[CaseItem]:
        """Yield the case.

        Raises: CollectError listing all problems of the file.
        """
        session = CaseSession.of(self.config)
        try:
            case = session.load(self)
        except CaseError as error:
            raise self.CollectError(str(error)) from error
        item: CaseItem = CaseItem.from_parent(self, name=case.name, case=case)
        yield item


class CaseItem(pytest.Item):
    """One case. The first one that runs starts the launch for the whole session."""

    def __init__(self, *, case: Case, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.case = case
        self._tree = read_document(self.path, lambda problem: None) or Entry({})
        plugins = self.config.pluginmanager
        if plugins.hasplugin("timeout"):
            self.add_marker(
                pytest.mark.timeout(0)
            )  # a case has its own limit, and the first one waits for all
        if plugins.hasplugin("xdist"):
            self.add_marker(pytest.mark.xdist_group("moeverify"))

    def runtest(self) -> None:
        """Wait for the verdict of the case.

        Raises: CaseFailure unless the case passes or is skipped.
        """
        wanted = [item.case for item in self.session.items if isinstance(item, CaseItem)]
        session = CaseSession.of(self.config)
        result = session.result(self.case, wanted)
        if result.checks:
            self.add_report_section("call", "checks", _list_checks(result))
        if result.verdict == "pass" and result.notes:
            self.add_report_section("call", "notes", "\n".join(result.notes))
        if result.verdict == "skipped":
            pytest.skip(result.reason)
        if result.verdict == "undecided" and session.allows_undecided:
            self.add_report_section("call", "undecided", result.reason)
            return
        if result.verdict != "pass":
            raise CaseFailure(result)

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """Return the findings as the console shows them, after a line with file and line number."""
        if isinstance(excinfo.value, CaseFailure):
            result = excinfo.value.result
            line = self.find_line(result.reason)
            return FailureText(f"{result.file}:{line}: {_summarize(result)}", self._render(result))
        if isinstance(excinfo.value, MoeverifyError):
            return FailureText(f"{self.case.file}:{self.find_line('')}: error: {excinfo.value}", "")
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return the location of `layout:`, with lines counted from 0."""
        return self.path, self.find_line("") - 1, f"case {self.case.name}"

    def find_line(self, text: str) -> int:
        """Return the line of the first field of this file that the text mentions, else of `layout:`."""
        return self._tree.find_line(text)

    def _render(self, result: CaseResult) -> str:
        command = CaseSession.of(self.config).command
        run = RunResult(verdict="error", environment={}, command=command, cases=(result,))
        text = io.StringIO()
        render_run(run, open_console(text), quiet=True)
        return text.getvalue().rpartition("\n\n")[0]  # without the summary line of all cases


class CaseFailure(Exception):
    """A case that differs from its golden, or that could not be run."""

    def __init__(self, result: CaseResult) -> None:
        self.result = result
        super().__init__(_summarize(result))


@dataclass(frozen=True)
class FailureText:
    """The text that pytest prints for a failure; `message` also appears in its one-line summary."""

    message: str
    text: str

    @property
    def reprcrash(self) -> FailureText:
        """Return the object whose `message` pytest puts into the summary."""
        return self

    def __str__(self) -> str:
        """Return the complete text."""
        return f"{self.message}\n\n{self.text}" if self.text else self.message

    def toterminal(self, writer: Any) -> None:
        """Print the complete text, the first line in red."""
        head, _, rest = str(self).partition("\n")
        writer.line(head, red=True, bold=True)
        writer.line(rest)


def _summarize(result: CaseResult) -> str:
    """Return one line: the verdict, and the first finding or the reason."""
    if not result.findings:
        return f"{result.verdict}: {result.reason.partition(chr(10))[0]}"
    first = order_findings(result.findings)[0]
    return f"{result.verdict}: {name_finding(first)}: error {format_excess(first.error, first.bound)}"


def _list_checks(result: CaseResult) -> str:
    """Return one line per check: verdict, number of tensors, and the worst of them."""
    lines = []
    for check in result.checks:
        line = f"{check.verdict:<8} {check.name}: {check.tensors} tensors"
        if check.worst is not None:
            worst = check.worst
            line += f", worst {format_number(worst.error)} / {format_bound(worst.bound)} in {worst.tensor}"
        lines.append(line)
    return "\n".join(lines)
