"""`moeverify run --watch`: after a change of files, run again the cases that it touches, and report all of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moeverify.cli.arguments import CaseSelection
from moeverify.cli.context import CommandContext
from moeverify.errors import CaseError, Problem

if TYPE_CHECKING:
    from moeverify.case.schema import Case
    from moeverify.results.run import CaseResult
    from moeverify.validation.load import Loaded

_MOST_NAMES = 8
_PAUSE = 2000  # milliseconds


@dataclass(frozen=True)
class Verified:
    """What came of the cases of a command: the exit code, the results by name, and the key of what each case says.

    A key is that of all that decides a verdict: the fields of the case and its recipe, and code beside its file.
    """

    code: int
    cases: Sequence[Case]
    results: Mapping[str, CaseResult]
    keys: Mapping[str, str]


Verify = Callable[["Loaded", Mapping[str, "CaseResult"]], Verified]
"""Runs the cases that are not among the known results, and reports all."""


def check_watch() -> None:
    """Make sure that files can be watched here.

    Raises: CaseError where the package is missing, or where the ranks belong to another launcher.
    """
    from moeverify.launch.world import external_world

    problems = []
    if importlib.util.find_spec("watchfiles") is None:
        remedy = "`pip install 'moeverify[watch]'` installs it"
        problems.append(Problem("--watch needs the package watchfiles", remedy=remedy))
    if external_world() is not None:
        message = "--watch starts ranks again and again, and these belong to another launcher"
        problems.append(Problem(message, remedy="start the command without torchrun or srun"))
    if problems:
        raise CaseError(problems)


def rerun_on_changes(
    selection: CaseSelection,
    read_keys: Callable[[Sequence[Case]], Mapping[str, str]],
    verify: Verify,
    last: Verified,
    context: CommandContext,
) -> int:
    """Wait for changes and run again what they touch until Ctrl-C; return the exit code of the last run."""
    from moeverify.report.problems import render_error

    refusal = ""
    for _ in _wait(last.cases, context):
        try:
            loaded = _load(selection, last)
        except CaseError as error:
            if str(error) != refusal:  # an editor saves more than once
                render_error(error, context.err)
            refusal = str(error)
            continue
        refusal = ""
        keys = read_keys(loaded.cases)
        touched = [name for name, key in keys.items() if last.keys.get(name) != key]
        if not touched and keys.keys() == last.keys.keys():
            continue
        more = f" and {len(touched) - _MOST_NAMES} more" if len(touched) > _MOST_NAMES else ""
        text = f"changed: {', '.join(touched[:_MOST_NAMES]) or 'the choice of cases'}{more}"
        context.out.print(text, soft_wrap=True, markup=False, highlight=False)
        known = {name: last.results[name] for name in keys if name not in touched and name in last.results}
        last = verify(loaded, known)
    return last.code


def _load(selection: CaseSelection, last: Verified) -> Loaded:
    """Return the valid cases; a file of a folder may be refused if it was before.

    Raises: CaseError with all that is wrong.
    """
    loaded = selection.load_valid()
    if not {Path(case.file) for case in last.cases}.isdisjoint(loaded.refused):
        raise CaseError(loaded.problems)
    return loaded


def _wait(cases: Sequence[Case], context: CommandContext) -> Iterator[None]:
    """Yield after each change in the folders of the cases, and every few seconds; end at Ctrl-C.

    Without the pauses a change would be lost that comes before the watcher stands, or on a disk that tells of none.
    """
    from watchfiles import watch

    folders = list_folders(cases)
    names = ", ".join(str(folder) for folder in folders)
    context.out.print(f"watching {names}; Ctrl-C ends", soft_wrap=True, markup=False, highlight=False)
    changes = watch(
        *folders, watch_filter=_is_read, raise_interrupt=False, rust_timeout=_PAUSE, yield_on_timeout=True
    )
    for _ in changes:
        yield None


def list_folders(cases: Sequence[Case]) -> list[Path]:
    """Return the folders that hold the cases, their recipes and code of their own; none is inside another."""
    from moeverify.controller.finished import has_own_code
    from moeverify.controller.search_path import search_path

    wanted = {Path(case.file).resolve().parent for case in cases}
    wanted |= {Path(search_path(case)[0]) for case in cases if has_own_code(case)}
    return sorted(folder for folder in wanted if not wanted & set(folder.parents))


def _is_read(_change: object, path: str) -> bool:
    return path.endswith((".yaml", ".yml", ".py", ".json"))
