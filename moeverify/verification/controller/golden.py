"""`moeverify golden`: the only way to change a recorded golden. Does not import torch in this process."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from moeverify.cases.schema import Case
from moeverify.cases.validation.load import load_cases
from moeverify.errors import CaseError, RankFailure
from moeverify.report.words.failure import describe_failure
from moeverify.results.golden import GoldenPlan, GoldenRow
from moeverify.results.run import Event
from moeverify.verification.controller.goldens import GOLDEN_TIMEOUT, GoldenSet
from moeverify.verification.controller.machine import choose_device
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.scratch import scratch_folder
from moeverify.verification.controller.tasks import Task, make_job, read_outcome, run_tasks
from moeverify.verification.golden.file import write_golden
from moeverify.verification.jobs import (
    WORKER,
    GoldenEnd,
    GoldenResult,
    GoldenSummary,
    PlanJob,
    PlanResult,
    Refusal,
    read_report,
)
from moeverify.verification.launch.plan import JobOutcome, LaunchEvent

_MOST_DEEP = 4


def record_goldens(
    cases: Sequence[Case], options: RunOptions, on_event: Callable[[Event], None], *, check: bool = False
) -> list[GoldenRow]:
    """Record or refresh the goldens of the cases' recipes. With `check`, write nothing.

    A golden that agrees with the result of this machine is left unchanged, byte for byte.

    Raises: RankFailure when a golden could not be computed.
    """
    goldens = GoldenSet.of([_without_options(case) for case in cases], options, fresh=True)
    device = choose_device(options.device)
    total = len(goldens.orders)

    def on_launch(event: LaunchEvent) -> None:
        if event.kind == "launch":
            on_event(Event(kind="launch", num_total=total, num_ranks=event.num_ranks))
        elif event.kind == "start":
            on_event(Event(kind="golden", num_total=total, recipes=goldens.recipes))
        elif event.kind == "report":
            end = read_report(event.detail)
            assert isinstance(end, GoldenEnd)
            on_event(Event(kind="case-end", case=end.recipe, num_done=end.num_done, num_total=total))

    task = Task(goldens.job(min(2, total)), lambda outcome: _settle_all(goldens, outcome, check=check))
    with goldens.swept(), scratch_folder() as folder:
        found = list(run_tasks([task], entry=WORKER, folder=folder, device=device, on_event=on_launch))
    known = _load_beside(cases)
    unused = find_unused(known, options.golden_folder) if known is not None else []
    return [*(row for rows in found for row in rows), *unused]


def plan_goldens(cases: Sequence[Case], options: RunOptions) -> list[GoldenPlan]:
    """Return the predicted costs of the goldens of sketches of the cases' recipes, each once.

    Raises: CaseError when a case does not permit sketches, RankFailure when the device cannot be measured.
    """
    goldens = GoldenSet.of([_without_options(case) for case in cases], replace(options, sketch="always"))
    asked = PlanJob(recipes=tuple(order.recipe for order in goldens.orders.values()))
    task = Task(make_job("plans", 1, GOLDEN_TIMEOUT, asked), _read_plans)
    with scratch_folder() as folder:
        device = choose_device(options.device)
        found = run_tasks([task], entry=WORKER, folder=folder, device=device, on_event=lambda event: None)
        return [plan for plans in found for plan in plans]


def _read_plans(outcome: JobOutcome) -> tuple[GoldenPlan, ...]:
    answer = read_outcome(outcome, PlanResult)
    if answer is None or isinstance(answer, Refusal):
        raise RankFailure(f"the cost cannot be predicted: {describe_failure(outcome.failure)}")
    return answer.plans


def _without_options(case: Case) -> Case:
    """Return the case without optional checks, whose tensors are not part of the file in git."""
    return case.model_copy(update={"checks": case.checks.model_copy(update={"also": ()})})


def _settle_all(goldens: GoldenSet, outcome: JobOutcome, *, check: bool) -> list[GoldenRow]:
    """Write the goldens that need it, and return the row of each golden."""
    answer = read_outcome(outcome, GoldenResult)
    if answer is None or isinstance(answer, Refusal):
        reason = describe_failure(outcome.failure)
        raise RankFailure(f"the goldens could not be made: {reason}\n{_first_stack(outcome)}")
    return [
        _settle(goldens, folder, found, answer.device_class, check=check)
        for folder, found in zip(goldens.orders, answer.goldens, strict=True)
    ]


def _settle(
    goldens: GoldenSet, folder: Path, answer: GoldenSummary | Refusal, device_class: str, *, check: bool
) -> GoldenRow:
    state = goldens.examine(folder, answer, device_class)
    if isinstance(answer, Refusal):
        raise RankFailure(f"{state.recipe}: {answer.error}")
    if state.status == "recorded":
        return GoldenRow(name=state.path, status="unchanged", state=state)
    is_missing = state.status == "missing"
    if check:
        return GoldenRow(name=state.path, status="missing" if is_missing else "differs", state=state)
    write_golden(Path(state.path), goldens.make_file(folder, answer, device_class))
    return GoldenRow(name=state.path, status="recorded" if is_missing else "refreshed", state=state)


def find_unused(cases: Sequence[Case], folder: Path | None) -> list[GoldenRow]:
    """Return a row for each golden in `folder` that no case uses.

    The cases are `cases` and all cases below the parent of `folder`.
    """
    if folder is None:
        return []
    unknown = {path: _find_recipe(path) for path in sorted(folder.glob("*.json"))}
    for used in itertools.chain((case.recipe.name for case in cases), _find_recipes(folder.resolve().parent)):
        unknown = {path: recipe for path, recipe in unknown.items() if recipe != used}
        if not unknown:
            break
    return [GoldenRow(name=str(path), status="unused") for path in unknown]


def _find_recipe(path: Path) -> str:
    return path.name.rsplit(".", 2)[0]  # RECIPE.DEVICE.json; the recipe name may contain dots


def _find_recipes(root: Path) -> Iterator[str]:
    """Yield the recipe names of all cases below a folder.

    Skips hidden folders, virtual environments and folders nested more than 4 levels deep.
    """
    for name, folders, files in os.walk(root):
        depth = len(Path(name).relative_to(root).parts)
        folders[:] = [
            each
            for each in sorted(folders)
            if depth < _MOST_DEEP and not each.startswith(".") and not Path(name, each, "pyvenv.cfg").exists()
        ]
        for file in sorted(files):
            if file.endswith(".yaml") and Path(name).name != "recipes":
                with suppress(CaseError):  # a file that is no case uses no golden
                    yield from (case.recipe.name for case in load_cases([Path(name, file)]))


def _load_beside(cases: Sequence[Case]) -> list[Case] | None:
    """Return the cases and the other cases in their folders, or None if one of these is invalid."""
    folders = sorted({Path(case.file).parent for case in cases if case.file})
    try:
        return [*cases, *load_cases(folders)]
    except CaseError:
        return None  # the invalid case may be the one that uses a golden


def _first_stack(outcome: JobOutcome) -> str:
    return next((report.stack for report in outcome.rank_reports if report.stack), "")
