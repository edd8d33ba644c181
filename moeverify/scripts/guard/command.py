"""Execution of a user's command under guard: ranks sample, and this process judges. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from moeverify.report.words.run import word_finding
from moeverify.results.finding import Finding
from moeverify.scripts.guard.exchange import FINDINGS
from moeverify.scripts.guard.judge import Judge
from moeverify.scripts.guard.settings import VARIABLE, GuardSettings
from moeverify.scripts.record.command import run_command

Show = Callable[[Finding], None]


class GuardedCommand:
    """A command under guard. Each finding is passed to `show` and appended to the folder's JSON lines."""

    def __init__(self, settings: GuardSettings, show: Show, *, stops: bool) -> None:
        self._settings = settings
        self._show = show
        self._stops = stops
        self.judge = Judge(settings.out)
        self.findings: list[Finding] = []
        self.refused: OSError | None = None  # the error that kept findings from being written

    def run(self, command: Sequence[str]) -> int:
        """Run the command until it ends and return its exit code.

        Raises: CaseError when the command cannot be started.
        """
        try:
            return run_command(command, {VARIABLE: self._settings.model_dump_json()}, self._look)
        finally:
            self._take(self.judge.look(is_over=True))
            self.judge.remove()

    def _look(self) -> bool:
        self._take(self.judge.look())
        return self._stops and bool(self.findings)

    def _take(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            worded = word_finding(finding)
            self.findings.append(worded)
            self._show(worded)
            try:
                append_line(self._settings.out / FINDINGS, worded)
            except OSError as error:  # a full disk must not end the command; the finding was shown
                self.refused = error


def append_line(path: Path, finding: Finding) -> None:
    """Append a finding to a file of JSON lines, with its identifying fields first.

    Raises: OSError when writing fails.
    """
    content = finding.model_dump(mode="json", exclude_defaults=True, exclude={"facts"})
    if finding.facts is not None:
        content["facts"] = finding.facts.model_dump(mode="json")
    first = {key: content.pop(key) for key in ("check", "step", "ranks", "tensor", "cause") if key in content}
    with path.open("a") as file:
        file.write(json.dumps({**first, **content}) + "\n")
