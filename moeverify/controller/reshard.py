"""`moeverify reshard`: every given layout saves, every one loads, and trains on. No torch in this process."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moeverify.case.schema import Case, Layout
from moeverify.controller.machine import choose_device
from moeverify.controller.options import RunOptions
from moeverify.controller.run import CaseRun, OnEvent, run_folder
from moeverify.errors import CaseError, Problem
from moeverify.launch.plan import JobOutcome
from moeverify.launch.world import external_world
from moeverify.results.run import CaseResult, RunResult

SINGLE = "single"
FURTHER_STEPS = 2
"""How many steps are trained after a load: an optimizer's state shows in the first, its own update in the second."""


@dataclass(frozen=True)
class Pair:
    """A layout that saves and one that loads, of one recipe."""

    saver: Case
    loader: Case

    @property
    def name(self) -> str:
        """Return what reports call the pair."""
        return f"{self.saver.name} -> {self.loader.name}"

    @property
    def case(self) -> Case:
        """Return the case that loads, under the pair's name."""
        return self.loader.model_copy(update={"name": self.name, "checkpoint": self.saver.checkpoint})


def make_pairs(cases: Sequence[Case]) -> list[Pair]:
    """Return all ordered pairs of the cases of each recipe, a single device included.

    Raises: CaseError where a recipe is too short for steps before and after the save.
    """
    problems = [problem for case in cases for problem in _check(case)]
    if problems:
        raise CaseError(problems)
    by_recipe: dict[str, list[Case]] = {}
    for case in cases:
        by_recipe.setdefault(case.recipe.fingerprint(), []).append(case)
    pairs = []
    for given in by_recipe.values():
        has_single = any(case.layout.world_size == 1 for case in given)
        members = given if has_single else [_make_single(given[0], len(by_recipe) > 1), *given]
        pairs += [Pair(saver, loader) for saver in members for loader in members]
    return pairs


def _check(case: Case) -> list[Problem]:
    needed = case.checkpoint.after + FURTHER_STEPS
    if case.recipe.steps >= needed:
        return []
    message = (
        f"a save after step {case.checkpoint.after} and {FURTHER_STEPS} more steps need recipe.steps {needed}"
    )
    remedy = f"set recipe.steps to {needed} or more, or save earlier"
    return [Problem(message, case.file, path="checkpoint.after", remedy=remedy)]


def _make_single(case: Case, is_one_of_several: bool) -> Case:
    name = f"{SINGLE} {case.recipe.name}" if is_one_of_several else SINGLE
    return case.model_copy(update={"name": name, "description": "", "layout": Layout()})


def run_pairs(
    pairs: Sequence[Pair],
    options: RunOptions,
    on_event: OnEvent,
    faults: Mapping[str, str] | None = None,
) -> RunResult | None:
    """Return the verdict of each pair; on any rank but the first of an external launch, None.

    Each saving case runs once, then everything that loads from it. `faults` names a function to call on every
    rank before it saves or loads, by the pair's name; such a pair has a save of its own.

    Raises: MachineError where the device that was asked for is not there, CaseError where ranks that another
    launcher has started share no folder.
    """
    if external_world() is not None and options.folder is None:
        remedy = "add `--out DIR` with a folder that all ranks see"
        raise CaseError(
            [Problem("the ranks need a place for their checkpoints", path="--out", remedy=remedy)]
        )
    run = _PairRun(_plan(pairs, faults or {}), options, on_event)
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    with run_folder(options.folder) as folder:
        for _ in run.execute(folder):
            pass  # the caller hears of it by the event
    result = run.conclude(started, began)
    return None if result is None else _leave_out_saves(result, run.tasks)


@dataclass(frozen=True)
class _Task:
    """One job: a save, or the load of a pair. `place` is the number of the folder with the checkpoint."""

    case: Case
    place: int
    pair: Pair | None = None
    fault: str | None = None


def _plan(pairs: Sequence[Pair], faults: Mapping[str, str]) -> dict[str, _Task]:
    """Return the jobs by name: a save before the loads that need it."""
    by_save: dict[tuple[str, str | None], list[Pair]] = {}
    for pair in pairs:
        by_save.setdefault((pair.saver.name, faults.get(pair.name)), []).append(pair)
    tasks: dict[str, _Task] = {}
    for place, ((name, fault), members) in enumerate(by_save.items()):
        label = f"save {name}" if fault is None else f"save {members[0].name}"
        tasks[label] = _Task(members[0].saver.model_copy(update={"name": label}), place, None, fault)
        for pair in members:
            tasks[pair.name] = _Task(pair.case, place, pair, fault)
    return tasks


class _PairRun(CaseRun):
    """A run whose jobs are saves and loads."""

    def __init__(self, tasks: Mapping[str, _Task], options: RunOptions, on_event: OnEvent) -> None:
        self.tasks = tasks
        self._folder = Path()
        chosen = {name: task.fault for name, task in tasks.items() if task.fault is not None}
        super().__init__(
            [task.case for task in tasks.values()],
            replace(options, case_faults={**options.case_faults, **chosen}),
            choose_device(options.device),
            on_event,
        )

    def execute(self, folder: Path) -> Generator[CaseResult]:
        """Run everything and yield each result as soon as it is known."""
        self._folder = folder.resolve()
        return super().execute(folder)

    def say_more(self, case: Case) -> dict[str, Any]:
        """Return whether to save or to load, and where."""
        task = self.tasks[case.name]
        place = self._folder / "checkpoints" / f"{task.place:04d}"
        return {"kind": "save" if task.pair is None else "load", "checkpoint": str(place)}

    def find_obstacle(self, case: Case) -> str:
        """Return why a save or a load cannot run here: what cannot be saved cannot be loaded either."""
        pair = self.tasks[case.name].pair
        own = super().find_obstacle(case)
        if own or pair is None:
            return own
        of_saver = super().find_obstacle(pair.saver)
        return of_saver and f"{pair.saver.name} cannot save here: {of_saver}"

    def judge(self, case: Case, outcome: JobOutcome) -> CaseResult:
        """Return the verdict of a job; a load without its save says so, and not that a folder is missing."""
        task, result = self.tasks[case.name], super().judge(case, outcome)
        if task.pair is None or result.verdict != "error":
            return result
        saved = next(
            self.results.get(name)
            for name, other in self.tasks.items()
            if other.pair is None and other.place == task.place
        )
        if saved is None or saved.verdict == "pass":
            return result
        return result.model_copy(update={"reason": f"nothing to load: `{saved.name}` failed"})


def _leave_out_saves(result: RunResult, tasks: Mapping[str, _Task]) -> RunResult:
    """Return the result with the pairs, and the saves that failed."""
    kept = []
    for case in result.cases:
        pair = tasks[case.name].pair
        if pair is not None:
            named = {
                "saved_by": pair.saver.name,
                "loaded_by": pair.loader.name,
                "saver_file": pair.saver.file,
            }
            kept.append(case.model_copy(update=named))
        elif case.verdict not in ("pass", "skipped"):
            kept.append(case.model_copy(update={"saver_file": case.file}))
    return result.model_copy(update={"cases": tuple(kept)})
