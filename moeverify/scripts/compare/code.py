"""The lines of a watched script from which a difference between two runs may come."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moeverify.explain.executed_code import ExecutedCode
from moeverify.explain.program import Executed
from moeverify.results.culprit import Origin
from moeverify.results.finding import Finding
from moeverify.results.script import ScriptCheck
from moeverify.scripts.record.executed import checksum_source
from moeverify.scripts.record.read import RankRecord, RecordedRun

_MOST_ORIGINS = 3
# The script's line at the end of a call site, such as `accelerate/optimizer.py:186 from train.py:52`.
_SITE = re.compile(r"([\w.-]+\.py):(\d+)$")


class ScriptCode:
    """Code that two runs of a script executed.

    Files that differ between the runs, or have changed since, do not count.
    """

    def __init__(self, expected: RecordedRun, actual: RecordedRun) -> None:
        self._expected, self._actual = expected, actual
        self._compared: dict[tuple[int, tuple[int, ...]], tuple[ExecutedCode, list[str]]] = {}

    def add_origins(self, finding: Finding) -> Finding:
        """Return a finding with at most three lines that the runs executed differently, or with other Python values.

        Tensors of the first recorded step have none: all parallel code of a model differs from one device's.
        """
        is_of_setup = finding.check in (ScriptCheck.BATCH, ScriptCheck.OPTIONS, ScriptCheck.PARAMETERS)
        is_later = finding.step > self._actual.steps[0] and finding.check != ScriptCheck.CALLS
        if finding.follows or not (is_of_setup or is_later):
            return finding
        # A rank draws its own rows, but a wrong gradient may come from any rank.
        is_local = finding.check == ScriptCheck.BATCH
        ranks = tuple(each.rank for each in self._actual.ranks if each.rank in finding.ranks or not is_local)
        code, files = self._compare(max(finding.step, 0), ranks)
        sites = filter(None, (_SITE.search(each.site) for each in finding.sites))
        calls = [(file, int(site[2])) for site in sites for file in files if Path(file).name == site[1]]
        found: dict[tuple[str, int], Origin] = {}
        for origin in code.find(calls):
            found.setdefault((origin.line.file, origin.line.line), origin)
        return finding.model_copy(update={"origins": tuple(found.values())[:_MOST_ORIGINS]})

    def _compare(self, step: int, ranks: tuple[int, ...]) -> tuple[ExecutedCode, list[str]]:
        """Return the code of some ranks up to a step, and its files. Findings of a step share it."""
        if (step, ranks) not in self._compared:
            records = [*(each for each in self._actual.ranks if each.rank in ranks), self._expected.ranks[0]]
            sources = _list_sources(records)
            *many, one = (_join_steps(each, sources) for each in records)
            self._compared[step, ranks] = ExecutedCode(many, one, step), sorted(sources)
        return self._compared[step, ranks]


def _list_sources(records: Sequence[RankRecord]) -> set[str]:
    """Return the files that all ranks executed in the version that is on disk now."""
    versions = [
        {file.path: file.checksum for step in each.executed for file in step.files} for each in records
    ]
    known = set.intersection(*map(set, versions))
    return {path for path in known if all(each[path] == checksum_source(path) != -1 for each in versions)}


def _join_steps(record: RankRecord, sources: set[str]) -> Executed:
    executed = Executed()
    for step in record.executed:
        lines = executed.lines.setdefault(step.step, set())
        names: dict[tuple[str, int, str], list[Any]] = executed.names.setdefault(step.step, {})
        for file in step.files:
            if file.path in sources:
                lines.update((file.path, line) for line in file.lines)
                names |= {
                    (file.path, line, name): [_to_tuple(each) for each in values]
                    for line, name, values in file.names
                }
                executed.skipped.update((file.path, *span) for span in file.skipped)
    return executed


def _to_tuple(value: Any) -> Any:
    """Return data of JSON with tuples for lists."""
    return tuple(map(_to_tuple, value)) if isinstance(value, list | tuple) else value
