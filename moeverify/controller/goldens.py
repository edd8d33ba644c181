"""The goldens of a run as the controller sees them: what a rank computed, against what stands in git. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from moeverify.case.schema import Case, Recipe
from moeverify.controller.machine import answer_version, default_cache
from moeverify.controller.options import RunOptions
from moeverify.controller.search_path import search_path
from moeverify.errors import FormatError
from moeverify.golden.file import GoldenFile, golden_path, read_golden
from moeverify.golden.proximity import worst_distance
from moeverify.launch.plan import Job

GOLDEN_TIMEOUT = 1800.0
TOLERANCE = 1e-9
"""How far fingerprints may differ between machines: rounding of float64 sums, carried through a few steps."""

ACROSS = 1e-10
"""How far the goldens of a GPU and of a CPU may differ: both are float64."""

CPU = "cpu"

Status = Literal["recorded", "missing", "changed", "differs", "unreadable", "failed"]


@dataclass(frozen=True)
class GoldenState:
    """Whether the golden in git is that of the recipe; `message` says what is wrong and what to type.

    `nearness` says how close a GPU's golden is to the recorded one of a CPU, where there is one.
    """

    status: Status
    message: str = ""
    nearness: str = ""


@dataclass(frozen=True)
class GoldenSet:
    """The goldens that a run needs: one for each recipe among its cases."""

    recipes: Sequence[Recipe]
    cases: Mapping[str, Case]
    options: RunOptions
    answer: str = field(default_factory=answer_version)

    @classmethod
    def of(cls, cases: Sequence[Case], options: RunOptions) -> GoldenSet:
        """Return the goldens of these cases, each recipe once."""
        recipes: dict[str, Recipe] = {}
        first: dict[str, Case] = {}
        for case in cases:
            recipes.setdefault(case.recipe.fingerprint(), case.recipe)
            first.setdefault(case.recipe.fingerprint(), case)
        return cls(list(recipes.values()), first, options)

    @property
    def cache(self) -> Path:
        """Return the folder of full goldens."""
        return (self.options.cache_folder or default_cache()).resolve()

    def job(self, num_ranks: int, *, fresh: bool = False) -> Job:
        """Return the job that makes what is not cached; `fresh` makes everything anew."""
        payload = {
            "kind": "goldens",
            "recipes": [recipe.model_dump_json() for recipe in self.recipes],
            "cache": str(self.cache),
            "answer": self.answer,
            "fresh": [fresh or bool(recipe.model.functions) for recipe in self.recipes],
            "search_paths": [search_path(self.cases[recipe.fingerprint()]) for recipe in self.recipes],
        }
        return Job(name="goldens", num_ranks=num_ranks, timeout=GOLDEN_TIMEOUT, payload=payload)

    def examine(self, recipe: Recipe, answer: Mapping[str, Any], device_class: str) -> GoldenState:
        """Return how the golden in git stands to what a rank computed."""
        if "error" in answer:
            return GoldenState("failed", answer["error"])
        own = self._examine_own(recipe, answer, device_class)
        if device_class == CPU or own.status not in ("recorded", "missing"):
            return own
        return self._examine_across(recipe, answer, device_class, own)

    def _examine_across(
        self, recipe: Recipe, answer: Mapping[str, Any], device_class: str, own: GoldenState
    ) -> GoldenState:
        """Return the state with what a golden of a CPU adds to it."""
        path = golden_path(self.options.golden_folder, recipe.name, CPU)
        try:
            recorded = read_golden(path)
        except FormatError:
            return own
        if recorded is None or recorded.recipe != recipe.fingerprint():
            return own
        name, far = worst_distance(*_join(recorded, answer["summary"]))
        if far <= ACROSS:
            return replace(own, nearness=f"the golden of {device_class} is within {far:.1e} of {path}")
        message = (
            f"one {device_class} computes another golden than {path}: {name} is off by {far:.2g} of its norm, "
            f"and two devices in float64 should agree to {ACROSS:g}"
        )
        return GoldenState("differs", message)

    def _examine_own(self, recipe: Recipe, answer: Mapping[str, Any], device_class: str) -> GoldenState:
        path = golden_path(self.options.golden_folder, recipe.name, device_class)
        command = f"moeverify golden {self.cases[recipe.fingerprint()].file}"
        try:
            recorded = read_golden(path)
        except FormatError as error:
            return GoldenState("unreadable", str(error))
        if recorded is None:
            return GoldenState("missing", f"golden {path} is not recorded; record it with `{command}`")
        if recorded.recipe != recipe.fingerprint():
            message = (
                f"recipe {recipe.name} has changed: {path} was recorded for {recorded.recipe}, "
                f"this is {recipe.fingerprint()}; refresh it with `{command}`"
            )
            return GoldenState("changed", message)
        return _compare(path, recorded, answer["summary"], command)

    def make_file(self, recipe: Recipe, answer: Mapping[str, Any], device_class: str) -> GoldenFile:
        """Return the file to record for a recipe."""
        summary = answer["summary"]
        return GoldenFile(
            name=recipe.name,
            recipe=recipe.fingerprint(),
            device_class=device_class,
            losses=summary["losses"],
            tensors=summary["tensors"],
        )


def _compare(path: Path, recorded: GoldenFile, summary: Mapping[str, Any], command: str) -> GoldenState:
    name, far = worst_distance(*_join(recorded, summary))
    if far <= TOLERANCE:
        return GoldenState("recorded")
    message = (
        f"one device here computes another golden than {path}: {name} is off by {far:.2g} of its norm; "
        f"if the change is meant, refresh it with `{command}`"
    )
    return GoldenState("differs", message)


def _join(recorded: GoldenFile, summary: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fingerprints of what is recorded and of what was computed, losses among them."""

    def join(losses: Mapping[str, float], tensors: Mapping[str, list[float] | str]) -> dict[str, Any]:
        return {**{name: [value] for name, value in losses.items()}, **tensors}

    return join(recorded.losses, recorded.tensors), join(summary["losses"], summary["tensors"])
