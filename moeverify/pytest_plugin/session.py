"""The cases of one pytest session, the launch that runs them, and their goldens."""

from __future__ import annotations

import os
import shlex
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from moeverify.cases.schema import Case
from moeverify.cases.validation.load import load_cases
from moeverify.errors import CaseError, Problem
from moeverify.pytest_plugin.recognition import looks_like_case
from moeverify.pytest_plugin.runner import CaseRunner
from moeverify.report.words.note import describe_row
from moeverify.results.golden import GoldenRow
from moeverify.results.run import CaseResult
from moeverify.verification.controller.golden import find_unused
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.launch.world import external_world

_NAME = "moeverify-session"


class CaseSession:
    """A plugin that is registered with the first case, so that other sessions do not run its hooks."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._cases: dict[Path, Case] = {}
        self._parents: dict[Path, pytest.Collector] = {}
        self.options = _read_options(config)
        shared = getattr(config, "workerinput", {}).get("moeverify_folder")
        self._runner = CaseRunner(
            self.options,
            update=config.getoption("update_golden"),
            escalates=not config.getoption("moeverify_no_escalate"),
            shared=Path(shared) if shared else None,
        )

    @classmethod
    def of(cls, config: pytest.Config) -> CaseSession:
        """Return the instance of this pytest session; create it if necessary."""
        plugin = config.pluginmanager.get_plugin(_NAME)
        if plugin is None:
            plugin = cls(config)
            config.pluginmanager.register(plugin, _NAME)
        assert isinstance(plugin, cls)
        return plugin

    @property
    def command(self) -> str:
        """Return the `moeverify run` command that corresponds to this session, without the cases."""
        words = ["moeverify", "run"]
        for option, name in (("--device", "moeverify_device"), ("--timeout", "moeverify_timeout")):
            if self._config.getoption(name) not in (None, "auto"):
                words += [option, str(self._config.getoption(name))]
        if self.options.golden_folder != Path("golden"):
            words += ["--goldens", str(self.options.golden_folder)]
        if self.options.cache_folder is not None:
            words += ["--cache", str(self.options.cache_folder)]
        if self._config.getoption("moeverify_no_escalate"):
            words.append("--no-escalate")
        if self.allows_undecided:
            words.append("--allow-undecided")
        return shlex.join(words)

    @property
    def allows_undecided(self) -> bool:
        """Return whether an undecided case is no failure."""
        return bool(self._config.getoption("moeverify_allow_undecided"))

    @property
    def golden_lines(self) -> list[str]:
        """Return the status of the goldens, one line each; empty unless goldens were to be updated."""
        return [f"{row.status:<10}{row.name}  {describe_row(row)}".rstrip() for row in self._runner.rows]

    def load(self, collector: pytest.File) -> Case:
        """Return the case of a collected file.

        Raises: CaseError listing all problems, including conflicts with the cases collected before.
        """
        if external_world() is not None:
            message = "pytest cannot be a rank of torchrun or srun"
            raise CaseError([Problem(message, remedy="start `moeverify run` with it")])
        path = collector.path
        shown = _shorten(path, self._config)
        (case,) = load_cases([shown])
        others = [other for known, other in self._cases.items() if known != path and _collide(other, case)]
        load_cases([*(Path(other.file) for other in others), shown])
        self._cases[path] = case
        if collector.parent is not None:
            self._parents[path.parent] = collector.parent
        return case

    def result(self, case: Case, wanted: Sequence[Case]) -> CaseResult:
        """Return the verdict of a case; the first call runs all wanted cases."""
        return self._runner.result(case, wanted)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Add a failing test for unused goldens, if whole folders were collected and selected."""
        selected = {item.path for item in items} & self._cases.keys()
        is_whole = bool(selected) and all(
            path in selected
            for folder in {path.parent for path in self._cases}
            for path in folder.glob("*.yaml")
            if looks_like_case(path)
        )
        unused = find_unused(list(self._cases.values()), self.options.golden_folder) if is_whole else []
        if unused:
            parent = next(iter(self._parents.values()))
            items.append(UnusedGoldens.from_parent(parent, name="unused-goldens", rows=unused))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Report a skipped case at its own location instead of this plugin's."""
        report = yield
        if item.path in self._cases and report.skipped and isinstance(report.longrepr, tuple):
            path, line, _ = item.reportinfo()
            report.longrepr = (str(path), (line or 0) + 1, report.longrepr[2])
        return report

    def pytest_sessionfinish(self) -> None:
        """Stop the ranks, and pass the lines to print to the controller of pytest-xdist."""
        self._runner.close()
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output["moeverify_goldens"] = self.golden_lines


class UnusedGoldens(pytest.Item):
    """A test that always fails: a golden without a case looks verified but is not."""

    def __init__(self, *, rows: Sequence[GoldenRow], **keywords: Any) -> None:
        super().__init__(**keywords)
        self._rows = rows

    def runtest(self) -> None:
        """Fail with the list of unused goldens."""
        lines = [f"{row.name}: unused: {describe_row(row)}" for row in self._rows]
        pytest.fail("\n".join(lines), pytrace=False)


def _collide(one: Case, other: Case) -> bool:
    """Return whether two cases share a name, or share a recipe name with different recipes."""
    same_recipe = one.recipe.fingerprint() == other.recipe.fingerprint()
    return one.name == other.name or (one.recipe.name == other.recipe.name and not same_recipe)


def _read_options(config: pytest.Config) -> RunOptions:
    goldens = config.getoption("moeverify_goldens") or _shorten(config.rootpath / "golden", config)
    return RunOptions(
        device=config.getoption("moeverify_device"),
        require_goldens=os.environ.get("CI", "").strip().lower() in ("1", "true", "yes"),
        golden_folder=goldens,
        cache_folder=config.getoption("moeverify_cache"),
        timeout=config.getoption("moeverify_timeout"),
        must_decide=True,
    )


def _shorten(path: Path, config: pytest.Config) -> Path:
    """Return a path relative to the folder where pytest was started, if it is inside."""
    start = config.invocation_params.dir
    return path.relative_to(start) if path.is_relative_to(start) else path
