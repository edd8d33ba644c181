"""The goldens of a run in the controller: computed results against the files in git.

Does not import torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from moeverify.cases.schema import Case, Recipe
from moeverify.cases.validation.sketch import check_sketchable, find_sketch_problems
from moeverify.errors import CaseError, FormatError, Problem
from moeverify.results.golden import Deviation, GoldenState
from moeverify.stale_folders import remove_abandoned
from moeverify.verification.controller.machine import default_cache, golden_code, list_import_folders
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.search_path import search_path
from moeverify.verification.controller.tasks import make_job
from moeverify.verification.golden.file import GoldenFile, golden_path, read_golden
from moeverify.verification.golden.proximity import Fingerprint, worst_distance
from moeverify.verification.jobs import GoldenJob, GoldenOrder, GoldenSummary, Refusal
from moeverify.verification.launch.plan import Job

GOLDENS = "goldens"
"""Name of the job that computes the goldens."""

GOLDEN_TIMEOUT = 1800.0
_LEAST_TIME = 120.0
_GRACE = 5.0  # seconds
TOLERANCES: Mapping[str, float] = {"float64": 1e-9, "float32": 1e-3}
"""Tolerance between machines, by reference: rounding of sums, accumulated over a few steps."""

ACROSS = 1e-10
"""Tolerance between the goldens of a GPU and a CPU, which are both float64."""

CPU = "cpu"

_SKETCH = "+sketch"

Fingerprints = dict[str, Fingerprint]


@dataclass(frozen=True)
class GoldenSet:
    """The goldens that a run needs: one per recipe and set of optional checks.

    `orders` and `cases` (the first case that uses each golden) are keyed by the folder of the full golden,
    without the device class. `folders` maps each case name to that folder.
    """

    orders: Mapping[Path, GoldenOrder]
    cases: Mapping[Path, Case]
    folders: Mapping[str, Path]
    options: RunOptions

    @contextmanager
    def swept(self) -> Iterator[None]:
        """Remove the unfinished goldens of ranks that have ended when the block ends."""
        try:
            yield
        finally:
            for cache in {folder.parent for folder in self.orders}:
                remove_abandoned(cache.glob("*.partial"))

    @classmethod
    def of(cls, cases: Sequence[Case], options: RunOptions, *, fresh: bool = False) -> GoldenSet:
        """Return the goldens of these cases, each once. `fresh` recomputes all of them.

        Raises: CaseError when the cache or golden path exists and is not a folder, or if the options demand
        sketches and a case does not permit them.
        """
        cache = (options.cache_folder or default_cache()).resolve()
        for folder, option in ((cache, "--cache"), (options.golden_folder, "--goldens")):
            if folder is not None and folder.exists() and not folder.is_dir():
                raise CaseError([Problem(f"{folder} is no folder", path=option, remedy="name a folder")])
        codes = {also: golden_code(also) for also in {case.checks.also for case in cases}}
        orders: dict[Path, GoldenOrder] = {}
        first: dict[Path, Case] = {}
        folders: dict[str, Path] = {}
        limits: dict[Path, list[float | None]] = {}
        for case in cases:
            folder = cache / _name_golden(case, codes[case.checks.also])
            sketched = cache / _name_golden(case, codes[case.checks.also], _SKETCH)
            is_sketch = _takes_sketch(case, options, folder, sketched)
            folder = sketched if is_sketch else folder
            folders[case.name] = folder
            first.setdefault(folder, case)
            limits.setdefault(folder, []).append(_limit_of(case, options))
            orders.setdefault(
                folder,
                GoldenOrder(
                    recipe=case.recipe,
                    also=case.checks.also,
                    folder=folder,
                    # User code may have changed, which only a run can show.
                    fresh=fresh or bool(case.recipe.functions),
                    sketch=is_sketch,
                    search_path=tuple(search_path(case)),
                ),
            )
        for folder, asked in limits.items():
            limit = None if None in asked else max(each for each in asked if each is not None)
            orders[folder] = orders[folder].model_copy(update={"timeout": limit})
        return cls(orders, first, folders, options)

    def job(self, num_ranks: int) -> Job:
        """Return the job that computes the goldens that are not cached."""
        asked = GoldenJob(orders=tuple(self.orders.values()))
        limits = [order.timeout for order in asked.orders if order.timeout is not None]
        timeout = 0.0
        if limits:
            # Each golden has its own limit. The limit of the job covers a golden that is stuck where
            # signals have no effect.
            timeout = max(limits) * math.ceil(len(limits) / num_ranks) + _GRACE
        if len(limits) < len(asked.orders):
            timeout = max(timeout, GOLDEN_TIMEOUT)
        return make_job(GOLDENS, num_ranks, timeout, asked)

    def split(self) -> list[GoldenSet]:
        """Return a set for each golden."""
        return [replace(self, orders={folder: order}) for folder, order in self.orders.items()]

    def is_sketch(self, name: str) -> bool:
        """Return whether the golden of a case has sketches."""
        return self.orders[self.folders[name]].sketch

    @property
    def recipes(self) -> tuple[str, ...]:
        """Return the names of the recipes, each once."""
        return tuple(dict.fromkeys(order.recipe.name for order in self.orders.values()))

    def examine(self, folder: Path, answer: GoldenSummary | Refusal, device_class: str) -> GoldenState:
        """Return the state of the golden in git compared to the computed result."""
        recipe = self.orders[folder].recipe
        root = self.options.golden_folder
        cpu, device_class = (self._name_class(folder, each) for each in (CPU, device_class))
        path = None if root is None else golden_path(root, recipe.name, device_class)
        state = GoldenState(
            status="recorded",
            recipe=recipe.name,
            path=str(path or ""),
            device_class=device_class,
            case_file=self.cases[folder].file,
            current=recipe.fingerprint(),
        )
        if isinstance(answer, Refusal):
            return state.model_copy(update={"status": "failed", "error": answer.error})
        state = state.model_copy(update={"damage": answer.damage, "seconds": answer.seconds})
        if root is None or path is None:
            return state
        own = _examine_own(state, path, answer, TOLERANCES[recipe.reference])
        if device_class == cpu or own.status not in ("recorded", "missing"):
            return own
        return self._examine_across(own, recipe, answer, golden_path(root, recipe.name, cpu))

    def _examine_across(
        self, own: GoldenState, recipe: Recipe, answer: GoldenSummary, path: Path
    ) -> GoldenState:
        """Return the state of a GPU's golden, extended by the comparison to the golden of a CPU at `path`."""
        try:
            recorded = read_golden(path)
        except FormatError:
            return own
        if recorded is None or recorded.recipe != recipe.fingerprint():
            return own
        limit = ACROSS if recipe.reference == "float64" else TOLERANCES[recipe.reference]
        across = _measure(recorded, answer, limit)
        status = own.status if across.distance <= limit else "differs"
        return own.model_copy(update={"status": status, "across": across, "across_path": str(path)})

    def _name_class(self, folder: Path, device_class: str) -> str:
        """Return the device class in the name of the file in git, which marks goldens of sketches."""
        return device_class + _SKETCH if self.orders[folder].sketch else device_class

    def make_file(self, folder: Path, answer: GoldenSummary, device_class: str) -> GoldenFile:
        """Return the file to record for a recipe."""
        recipe = self.orders[folder].recipe
        return GoldenFile(
            name=recipe.name,
            recipe=recipe.fingerprint(),
            device_class=self._name_class(folder, device_class),
            losses=answer.losses,
            tensors=answer.tensors,
        )


def _name_golden(case: Case, code: str, mark: str = "") -> str:
    """Return the name of a full golden: recipe fingerprint, optional checks, code version, and place of user code.

    Two commands at the same time may run other code of the user under one recipe, such as two checkouts.
    """
    also = (name.replace(" ", "-") for name in sorted(case.checks.also))
    places = [*search_path(case), *list_import_folders()]
    own = f"-{hashlib.sha256(repr(places).encode()).hexdigest()[:8]}" if case.recipe.functions else ""
    return f"{'+'.join([case.recipe.fingerprint(), *also])}{mark}-{code}{own}"


def _limit_of(case: Case, options: RunOptions) -> float | None:
    """Return the limit of a golden in seconds: the option's, or one that the case sets itself.

    A short limit is meant to catch hangs of ranks, so one device still gets the default time of a case.
    """
    if options.timeout is not None:
        return options.timeout
    is_set = "timeout" in case.checks.model_fields_set
    return max(case.checks.timeout, _LEAST_TIME) if is_set else None


def _takes_sketch(case: Case, options: RunOptions, folder: Path, sketched: Path) -> bool:
    """Return whether a case is judged by a golden of sketches.

    Raises: CaseError when the options or the reference demand it, and the case does not permit it.
    """
    if options.sketch == "always" or case.recipe.reference != "float64":
        check_sketchable([case])
        return True
    if options.sketch == "never":
        return False
    return _is_any_stored(sketched) and not _is_any_stored(folder) and not find_sketch_problems(case)


def _is_any_stored(folder: Path) -> bool:
    """Return whether a golden is stored for any class of devices."""
    return any(folder.parent.glob(f"{folder.name}-*/golden.json"))


def _examine_own(state: GoldenState, path: Path, answer: GoldenSummary, tolerance: float) -> GoldenState:
    """Return the state of the golden of the same device class."""
    try:
        recorded = read_golden(path)
    except FormatError as error:
        broken = {"status": "unreadable", "error": error.problem, "remedy": error.remedy}
        return state.model_copy(update=broken)
    if recorded is None:
        return state.model_copy(update={"status": "missing"})
    if recorded.recipe != state.current:
        return state.model_copy(update={"status": "changed", "recorded": recorded.recipe})
    deviation = _measure(recorded, answer, tolerance)
    status = "recorded" if deviation.distance <= tolerance else "differs"
    return state.model_copy(update={"status": status, "deviation": deviation})


def _measure(recorded: GoldenFile, answer: GoldenSummary, limit: float) -> Deviation:
    """Return the fingerprint, losses included, that differs most from the recorded one."""

    def join(golden: GoldenFile | GoldenSummary) -> Fingerprints:
        return {**{name: [value] for name, value in golden.losses.items()}, **golden.tensors}

    name, distance = worst_distance(join(recorded), join(answer))
    return Deviation(name=name, distance=distance, limit=limit)
