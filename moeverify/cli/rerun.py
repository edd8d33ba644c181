"""`moeverify run --watch`: reruns the cases affected by a change of files, and reports all cases."""

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
    from moeverify.cases.schema import Case
    from moeverify.cases.validation.load import LoadedCases
    from moeverify.results.run import CaseResult

_MOST_NAMES = 8
_PAUSE = 2000  # milliseconds


@dataclass(frozen=True)
class Verified:
    """The outcome of a command's cases: exit code, results by name, and keys by name.

    A key identifies everything that decides a verdict: the fields of the case and its recipe, and the code
    beside its file.
    """

    code: int
    cases: Sequence[Case]
    results: Mapping[str, CaseResult]
    keys: Mapping[str, str]


Verify = Callable[["LoadedCases", Mapping[str, "CaseResult"]], Verified]
"""Function that runs the cases missing from the known results, and reports all cases."""


def check_watch() -> None:
    """Check that `--watch` can work here.

    Raises: CaseError if the package is missing, or if an external launcher started the ranks.
    """
    from moeverify.verification.launch.world import external_world

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
    """Wait for changes and rerun the affected cases until Ctrl-C; return the last exit code."""
    from moeverify.report.problems import render_error

    refusal = ""
    for _ in _wait(last.cases, context):
        try:
            loaded = _load(selection, last)
        except CaseError as error:
            if str(error) != refusal:  # an editor may save a file more than once
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


def _load(selection: CaseSelection, last: Verified) -> LoadedCases:
    """Return the valid cases; a file may only be invalid if it had no case in the last run.

    Raises: CaseError listing all problems.
    """
    loaded = selection.load_valid()
    if not {Path(case.file) for case in last.cases}.isdisjoint(loaded.refused):
        raise CaseError(loaded.problems)
    return loaded


def _wait(cases: Sequence[Case], context: CommandContext) -> Iterator[None]:
    """Yield after each change in the folders of the cases, and every few seconds; end at Ctrl-C.

    The timeout catches changes made before the watcher is ready, and on file systems without notifications.
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
    """Return the folders of the cases, their recipes and their own code; none contains another."""
    from moeverify.verification.controller.finished import has_own_code
    from moeverify.verification.controller.search_path import search_path

    wanted = {Path(case.file).resolve().parent for case in cases}
    wanted |= {Path(search_path(case)[0]) for case in cases if has_own_code(case)}
    return sorted(folder for folder in wanted if not wanted & set(folder.parents))


def _is_read(_change: object, path: str) -> bool:
    return path.endswith((".yaml", ".yml", ".py", ".json"))
