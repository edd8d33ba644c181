"""`moeverify golden`: the only way a recorded golden changes. No torch in this process."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moeverify.case.schema import Case, Recipe
from moeverify.controller.goldens import GoldenSet
from moeverify.controller.machine import choose_device
from moeverify.controller.options import RunOptions
from moeverify.controller.run import ENTRY
from moeverify.controller.scratch import scratch_folder
from moeverify.errors import CaseError, RankFailure
from moeverify.golden.file import golden_path, write_golden
from moeverify.launch.launcher import run_jobs
from moeverify.launch.plan import JobOutcome, LaunchEvent
from moeverify.results.run import Event
from moeverify.validation.load import load_cases

_MOST_DEEP = 4

RowStatus = Literal["recorded", "refreshed", "unchanged", "missing", "differs", "unused"]


@dataclass(frozen=True)
class GoldenRow:
    """What became of one golden."""

    name: str
    status: RowStatus
    detail: str = ""


def record_goldens(
    cases: Sequence[Case], options: RunOptions, on_event: Callable[[Event], None], *, check: bool = False
) -> list[GoldenRow]:
    """Record or refresh the goldens of the cases' recipes; with `check` write nothing.

    A golden that is already what this machine computes is left as it is, byte for byte.

    Raises: RankFailure where a golden could not be computed.
    """
    goldens = GoldenSet.of(cases, options)
    device = choose_device(options.device)
    total = len(goldens.recipes)

    def on_launch(event: LaunchEvent) -> None:
        if event.kind in ("launch", "start"):
            kind: Literal["launch", "golden"] = "launch" if event.kind == "launch" else "golden"
            on_event(Event(kind=kind, num_total=total, detail=f"{total} recipes"))

    job = goldens.job(min(2, total), fresh=True)
    with scratch_folder() as folder:
        outcome = next(
            iter(list(run_jobs([job], entry=ENTRY, folder=folder, device=device, on_event=on_launch)))
        )
    if outcome.state != "done" or outcome.result is None:
        raise RankFailure(f"the goldens could not be made: {outcome.summary}\n{_first_stack(outcome)}")
    rows = [_settle(goldens, recipe, outcome, check=check) for recipe in goldens.recipes]
    known = _load_beside(cases)
    return rows + (find_unused(known, options.golden_folder) if known is not None else [])


def _settle(goldens: GoldenSet, recipe: Recipe, outcome: JobOutcome, *, check: bool) -> GoldenRow:
    assert outcome.result is not None
    device_class = outcome.result["device_class"]
    answer = outcome.result["goldens"][recipe.fingerprint()]
    path = golden_path(goldens.options.golden_folder, recipe.name, device_class)
    state = goldens.examine(recipe, answer, device_class)
    if state.status == "failed":
        raise RankFailure(f"{recipe.name}: {state.message}")
    if state.status == "recorded":
        return GoldenRow(str(path), "unchanged")
    if check:
        return GoldenRow(str(path), "missing" if state.status == "missing" else "differs", state.message)
    write_golden(path, goldens.make_file(recipe, answer, device_class))
    if state.status == "missing":
        return GoldenRow(str(path), "recorded")
    return GoldenRow(str(path), "refreshed", state.message.split(";")[0])


def find_unused(cases: Sequence[Case], folder: Path) -> list[GoldenRow]:
    """Return a row for each golden that no case uses: none of these, and none below the folder around its own."""
    unknown = {path: _find_recipe(path) for path in sorted(folder.glob("*.json"))}
    for used in itertools.chain((case.recipe.name for case in cases), _find_recipes(folder.resolve().parent)):
        unknown = {path: recipe for path, recipe in unknown.items() if recipe != used}
        if not unknown:
            break
    return [
        GoldenRow(str(path), "unused", "no case uses it; delete it or restore its case") for path in unknown
    ]


def _find_recipe(path: Path) -> str:
    return path.name.rsplit(".", 2)[0]  # RECIPE.DEVICE.json, and a recipe's name may have dots


def _find_recipes(root: Path) -> Iterator[str]:
    """Yield the names of the recipes of all cases below a folder, whose goldens stand together.

    Hidden folders, virtual environments and what lies deep hold none.
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
                with suppress(CaseError):  # what is no case uses no golden
                    yield from (case.recipe.name for case in load_cases([Path(name, file)]))


def _load_beside(cases: Sequence[Case]) -> list[Case] | None:
    """Return these cases and those beside them in their folders, or None where one of these is broken."""
    folders = sorted({Path(case.file).parent for case in cases if case.file})
    try:
        return [*cases, *load_cases(folders)]
    except CaseError:
        return None  # the broken one may be the one that uses a golden


def _first_stack(outcome: JobOutcome) -> str:
    return next((report.stack for report in outcome.rank_reports if report.stack), "")
