"""The protocol of a check: what it shows and notes on the ranks, how it judges, and what its findings mean.

One file of this package is one check, or several of one make; `moeverify.checks.registry` finds them. A run calls

- `show` wherever a recipe is trained (for its golden, for the noise of one device, under the layout, and again where
  the layout is repeated), so that a check can have further logical tensors compared with the golden;
- `watch` on every rank of the layout's first run, so that it can note what no tensor says;
- `inspect` on every rank after a checkpoint was loaded;
- `judge` on rank 0, with what all ranks have shown and reported.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

from torch import Tensor

from moeverify.case.schema import Case, Layout, Recipe
from moeverify.checks.bounds import Bounds
from moeverify.collectives.trace import CollectiveTrace
from moeverify.compare.assembled import Assembled, Coordinates, Key
from moeverify.compare.comparison import Entry
from moeverify.golden.store import OwnResult, StoredGolden
from moeverify.layout.observer import Observer
from moeverify.layout.region import Region
from moeverify.results.checks import CheckName
from moeverify.results.comparable import comparable
from moeverify.results.facts import OwnStep
from moeverify.results.finding import CheckResult, Finding, Worst
from moeverify.results.load import ExpertLoad
from moeverify.train.program import Program

R = TypeVar("R")


class Role(Enum):
    """How the findings of a check relate to each other and to those of other checks."""

    DIAGNOSED = "a diagnosis says which of them began it; the others follow"
    ORIGIN = "they stand for themselves, whatever else is wrong"
    CONSEQUENCE = "they follow from whatever else is wrong"


ALONE = Layout()
"""The layout of a single device."""


@dataclass(frozen=True)
class Training:
    """One rank that trains a recipe, alone or under a layout; `coordinates` are its place on every mesh axis.

    `golden` is what its tensors are compared with; None where it is recorded.
    """

    recipe: Recipe
    program: Program
    layout: Layout = ALONE
    coordinates: Mapping[str, int] = field(default_factory=dict)
    golden: StoredGolden | None = None


@dataclass(frozen=True)
class RankRun:
    """One rank of a case that trains under its layout.

    `entries` are the comparisons of its tensors, once the run is over. `train_again` runs the same layout anew, on
    all ranks, and shows an observer its first steps.
    """

    case: Case
    trace: CollectiveTrace
    entries: Callable[[], Sequence[Entry]]
    train_again: Callable[[Observer, int], None]


@dataclass(frozen=True)
class RankLoad:
    """One rank that has loaded a checkpoint and trained on.

    `tensors` are the state right after the load, (name, local values, region), and `saved` is the state that the
    saving layout had. `entries` are the comparisons of the load and of the steps after it. `uninterrupted` are the
    bits of these steps in the run that went on after the save, in their order (None: the rank had nothing of it); it
    is None itself where that was another layout.
    """

    case: Case
    tensors: Sequence[tuple[str, Tensor, Region]]
    saved: StoredGolden
    entries: Sequence[Entry]
    uninterrupted: Sequence[tuple[Key, int | None]] | None


@dataclass(frozen=True)
class Compared:
    """Logical tensors of all ranks against the expected ones, and how far each may be from its own."""

    coordinates: Coordinates
    tensors: Mapping[Key, Assembled]
    bounds: Bounds

    def of_kinds(self, kinds: Sequence[str]) -> list[Assembled]:
        """Return the tensors of some kinds, step after step."""
        return [tensor for key, tensor in self.tensors.items() if key[1] in kinds]

    def place(self, rank: int) -> dict[str, int]:
        """Return where a rank is on every mesh axis."""
        return dict(self.coordinates.get(rank, {}))


@dataclass(frozen=True, kw_only=True)
class Shown(Compared):
    """A case as all ranks have shown it, put together on rank 0.

    `golden_names` has, for each step, the (kind, name) that the golden holds and the run must show. `saved` is what
    a checkpoint was made of, in a run that loads one. `load` is that of the experts, where it was counted.
    `own_results` are (check, kind, name) of what one device's own step makes otherwise than the recipe says.
    """

    case: Case
    golden_names: Mapping[int, set[tuple[str, str]]]
    saved: StoredGolden | None = None
    load: ExpertLoad | None = None
    own_results: frozenset[OwnResult] = frozenset()

    def list_own(self, check: CheckName) -> set[tuple[str, str]]:
        """Return the (kind, name) of which a check that computes again what the recipe says knows nothing."""
        return {(kind, name) for of, kind, name in self.own_results if of == check}

    def describe_own(self, names: Collection[str]) -> OwnStep | None:
        """Return facts about such results; None where there are none."""
        step = self.case.recipe.step
        return OwnStep(step=step, num_tensors=len(names), first=min(names)) if step and names else None


@dataclass(frozen=True)
class Outcome:
    """The verdict of one check, and everything that it found.

    `limits` are the relative errors from which on it would have found something, for each logical tensor that it
    measures by a relative error. What one check leaves inconclusive, another may decide.
    """

    result: CheckResult
    findings: tuple[Finding, ...] = ()
    limits: Mapping[Key, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Judgement:
    """The verdicts of all checks of a case, and everything that they found, step after step."""

    checks: tuple[CheckResult, ...]
    findings: tuple[Finding, ...]


class Watch(Generic[R]):
    """An observer of one run on one rank, with something to report at the end; by itself it notes nothing.

    It sees what is shown before the comparison does.
    """

    def begin_step(self, step: int) -> None:
        """Hear that a step begins."""

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """See one shard; see `moeverify.layout.observer.Observer`."""

    def close(self) -> None:
        """Let go of the model: the run is over, or was broken off."""

    def report(self) -> R:
        """Return what rank 0 is to judge, picklable and small; called after all runs.

        Collective: all ranks, check after check in the order of their names.
        """
        raise NotImplementedError


class Check(ABC, Generic[R]):
    """One check. `kinds` are those of the logical tensors that it compares with the golden.

    A kind of its own, shown by `show`, has the name of the check. One that `sees_inside` watches by hooks on modules,
    and is not made where passes are launched as graphs: hooks see no such pass. One that `recomputes_step` holds what
    a step makes to what the recipe says of it, which a user's own step may mean otherwise: see
    `moeverify.recording.own_step`.
    """

    name: CheckName
    kinds: tuple[str, ...] = ()
    role: Role = Role.DIAGNOSED
    sees_inside: bool = False
    recomputes_step: bool = False

    def show(self, training: Training, observer: Observer) -> Watch[Any] | None:
        """Return what shows `observer` further logical tensors of a run; None for a check that needs none.

        Only optional checks may: what they show becomes a part of the full golden.
        """
        return None

    def watch(self, run: RankRun, program: Program) -> Watch[R] | None:
        """Return what notes and reports on this rank; None where there is nothing to note.

        It must let go of the program when it is closed: a second run would else find two models in memory.
        """
        return None

    def inspect(self, load: RankLoad) -> R | None:
        """Return what this rank reports of a load; None where there is nothing to say."""
        return None

    @abstractmethod
    def judge(self, shown: Shown, reports: Sequence[R]) -> Outcome | None:
        """Return the verdict, on rank 0; None where the check has nothing to look at.

        `reports` are those of all ranks in their order, or empty where none had anything to note.
        """


def make_outcome(name: str, findings: Sequence[Finding], num_tensors: int, **rest: Any) -> Outcome:
    """Return the outcome of a check that allows no difference: its worst finding has the largest error."""
    worst = max(findings, key=lambda finding: comparable(finding.error), default=None)
    result = CheckResult(
        name=name,
        verdict="mismatch" if findings else "pass",
        tensors=num_tensors,
        worst=Worst(tensor=worst.tensor, error=worst.error, bound=0.0, step=worst.step) if worst else None,
        **rest,
    )
    return Outcome(result, tuple(findings))


def rate_error(error: float) -> float:
    """Return an error as it counts: what is no number is the largest."""
    return math.inf if math.isnan(error) else error
