"""`moeverify reshard`: each layout saves a checkpoint, and each layout loads all of them. No torch import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moeverify.cases.schema import Case, Layout
from moeverify.errors import CaseError, Problem
from moeverify.results.run import RunResult
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import CaseTask, OnEvent, find_machine, run_case_tasks, run_folder
from moeverify.verification.jobs import LoadJob, SaveJob
from moeverify.verification.launch.world import external_world

SINGLE = "single"
FURTHER_STEPS = 2
"""Training steps after a load. The first depends on the loaded optimizer state, the second on its update."""


@dataclass(frozen=True)
class LayoutPair:
    """A saving and a loading layout of the same recipe."""

    saver: Case
    loader: Case

    @property
    def name(self) -> str:
        """Return the name of the pair in reports."""
        return f"{self.saver.name} -> {self.loader.name}"

    @property
    def case(self) -> Case:
        """Return the loading case, under the name of the pair."""
        return self.loader.model_copy(update={"name": self.name, "checkpoint": self.saver.checkpoint})


def make_pairs(cases: Sequence[Case]) -> list[LayoutPair]:
    """Return all ordered pairs of the cases of each recipe, including a single device.

    Raises: CaseError when a recipe has too few steps before and after the save.
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
        pairs += [LayoutPair(saver, loader) for saver in members for loader in members]
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
    pairs: Sequence[LayoutPair],
    options: RunOptions,
    on_event: OnEvent,
    faults: Mapping[str, str] | None = None,
) -> RunResult | None:
    """Return the verdict of each pair, or None on ranks other than 0 of an external launch.

    Each saving case runs once, followed by the cases that load from it. `faults` maps the name of a pair to
    a function that every rank calls before it saves or loads. Such a pair has a separate save.

    Raises: MachineError when the requested device does not exist; CaseError when an external launch has no
    shared folder (`--out`).
    """
    if external_world() is not None and options.folder is None:
        remedy = "add `--out DIR` with a folder that all ranks see"
        raise CaseError(
            [Problem("the ranks need a place for their checkpoints", path="--out", remedy=remedy)]
        )
    machine = find_machine(options)
    with run_folder(options.folder) as folder:
        tasks = plan_tasks(pairs, options, faults or {}, folder.resolve() / "checkpoints")
        result = run_case_tasks(tasks, options, machine, folder, on_event)
    return None if result is None else _leave_out_saves(result)


def plan_tasks(
    pairs: Sequence[LayoutPair], options: RunOptions, faults: Mapping[str, str], folder: Path
) -> list[CaseTask]:
    """Return the tasks of these pairs, each save before its loads and with a separate folder."""
    by_save: dict[tuple[str, str | None], list[LayoutPair]] = {}
    for pair in pairs:
        by_save.setdefault((pair.saver.name, faults.get(pair.name)), []).append(pair)
    tasks: list[CaseTask] = []
    for number, ((name, fault), members) in enumerate(by_save.items()):
        checkpoint = folder / f"{number:04d}"
        label = f"save {name}" if fault is None else f"save {members[0].name}"
        saver = members[0].saver.model_copy(update={"name": label})
        chosen = fault if fault is not None else options.fault
        tasks.append(
            CaseTask(
                saver,
                partial(SaveJob, checkpoint=checkpoint),
                fault=chosen,
                labels={"saver_file": saver.file},
            )
        )
        tasks += [
            CaseTask(
                pair.case,
                partial(LoadJob, checkpoint=checkpoint),
                fault=chosen,
                needs=label,
                labels={
                    "saved_by": pair.saver.name,
                    "loaded_by": pair.loader.name,
                    "saver_file": pair.saver.file,
                },
            )
            for pair in members
        ]
    return tasks


def _leave_out_saves(result: RunResult) -> RunResult:
    """Return the result with the pairs and with the saves that did not pass."""
    kept = [case for case in result.cases if case.saved_by or case.verdict not in ("pass", "skipped")]
    return result.model_copy(update={"cases": tuple(kept)})
