"""Protocol of a check: the tensors it shows, the notes it takes on the ranks, and the verdict on rank 0.

Each file of this package defines one check, or several similar ones; `moeverify.verification.checks.registry` finds
them. A run calls

- `show` wherever a recipe is trained: for its golden, for the noise of one device, under the layout, and
  again where the layout is repeated. The check can add logical tensors to the comparison with the golden;
- `watch` on every rank of the layout's first run, to record facts that no tensor carries;
- `inspect` on every rank after a checkpoint was loaded;
- `judge` on rank 0, with the tensors and reports of all ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from moeverify.cases.schema import Case, Layout, Recipe
from moeverify.parallel.regions.observer import Observer
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import CheckName
from moeverify.results.comparable import comparable
from moeverify.results.facts import OwnStep
from moeverify.results.finding import CheckResult, Finding, Worst
from moeverify.results.load import ExpertLoad
from moeverify.verification.checks.bounds import Bounds, Parts
from moeverify.verification.collectives.trace import CollectiveTrace
from moeverify.verification.compare.assembled import Assembled, Coordinates, Key
from moeverify.verification.compare.comparison import ComparedShard
from moeverify.verification.golden.store import OwnResult, StoredGolden

if TYPE_CHECKING:  # it imports every parallelism, and comparisons of recorded scripts need none
    from moeverify.train.program import TrainingProgram

R = TypeVar("R")


class Role(Enum):
    """Relation between the findings of a check, and to the findings of other checks."""

    DIAGNOSED = "a diagnosis says which of them began it; the others follow"
    ORIGIN = "they stand for themselves, whatever else is wrong"
    CONSEQUENCE = "they follow from whatever else is wrong"


ALONE = Layout()
"""The layout of a single device."""


@dataclass(frozen=True)
class Training:
    """One rank that trains a recipe, alone or under a layout.

    `coordinates` maps each mesh axis to the rank's index on it. `golden` is the reference for its tensors;
    None while the golden is being recorded.
    """

    recipe: Recipe
    program: TrainingProgram
    layout: Layout = ALONE
    coordinates: Mapping[str, int] = field(default_factory=dict)
    golden: StoredGolden | None = None


@dataclass(frozen=True)
class RankRun:
    """One rank of a case that trains under its layout.

    `entries` returns the comparisons of its tensors; call it after the run. `train_again(observer,
    num_steps)` trains the first steps of the same layout again and shows them to an observer. It is
    collective: all ranks must call it. `dtypes` are the dtypes of one device; see `StoredGolden`. `alone` is
    a context in which this rank is the only one of the default process group.
    """

    case: Case
    trace: CollectiveTrace
    entries: Callable[[], Sequence[ComparedShard]]
    train_again: Callable[[Observer, int], None]
    dtypes: Mapping[tuple[str, str, str], str] = field(default_factory=dict)
    alone: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class RankLoad:
    """One rank that has loaded a checkpoint and continued training.

    - `tensors`: the state right after the load, as (name, local values, region).
    - `saved`: the state of the layout that saved the checkpoint.
    - `entries`: the comparisons of the load and of the steps after it.
    - `uninterrupted`: for the steps after the load, the hash of each tensor's bits in the run that
      continued after the save. A hash is None if the rank did not hold the tensor. The field is None if the
      saving run had another layout.
    """

    case: Case
    tensors: Sequence[tuple[str, Tensor, Region]]
    saved: StoredGolden
    entries: Sequence[ComparedShard]
    uninterrupted: Sequence[tuple[Key, int | None]] | None


@dataclass(frozen=True)
class ComparedTensors:
    """Logical tensors of all ranks compared with the expected ones, and the allowed errors."""

    coordinates: Coordinates
    tensors: Mapping[Key, Assembled]
    bounds: Bounds

    def of_kinds(self, kinds: Sequence[str]) -> list[Assembled]:
        """Return the tensors of the given kinds, ordered by step."""
        return [tensor for key, tensor in self.tensors.items() if key[1] in kinds]

    def place(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank on every mesh axis."""
        return dict(self.coordinates.get(rank, {}))

    def make_finding(
        self,
        check: CheckName,
        key: Key,
        ranks: Sequence[int],
        *,
        error: float,
        bound: float = 0.0,
        rank: int | None = None,
        **fields: Any,
    ) -> Finding:
        """Return a finding about the tensor of a key, with the coordinates of the rank with the largest error.

        That is `rank`, by default the first of the differing `ranks`. `fields` are other fields of the finding.
        """
        step, kind, name = key
        worst = ranks[0] if rank is None else rank
        return Finding(
            check=check,
            kind=kind,
            tensor=name,
            step=step,
            rank=worst,
            ranks=tuple(ranks),
            coordinates=self.place(worst),
            error=error,
            bound=bound,
            **fields,
        )


@dataclass(frozen=True, kw_only=True)
class ShownTensors(ComparedTensors):
    """The tensors that all ranks of a case have shown, assembled on rank 0.

    - `golden_names`: for each step, the (kind, name) pairs that the golden holds and the run must show.
    - `saved`: the state that the checkpoint was made from, in a run that loads one.
    - `load`: the load of the experts, if it was counted.
    - `own_results`: (check, kind, name) of each result of a user's own step that already differs from the
      recipe on one device.
    - `dtypes`: the dtypes of one device; see `StoredGolden`.
    """

    case: Case
    golden_names: Mapping[int, set[tuple[str, str]]]
    saved: StoredGolden | None = None
    load: ExpertLoad | None = None
    own_results: frozenset[OwnResult] = frozenset()
    dtypes: Mapping[tuple[str, str, str], str] = field(default_factory=dict)

    def list_own(self, check: CheckName) -> set[tuple[str, str]]:
        """Return the (kind, name) pairs that a check must skip, because the user's own step defines them."""
        return {(kind, name) for of, kind, name in self.own_results if of == check}

    def describe_own(self, names: Collection[str]) -> OwnStep | None:
        """Return facts about the skipped results; None if there are none."""
        step = self.case.recipe.step
        return OwnStep(step=step, num_tensors=len(names), first=min(names)) if step and names else None


@dataclass(frozen=True)
class CheckOutcome:
    """Verdict and findings of one check.

    `limits` holds, for each logical tensor that the check measures by a relative error, the smallest error
    that it would report. Another check may decide a tensor that this one leaves inconclusive. `parts` says
    where these limits come from, and `errors` has the errors of whole tensors. `vanishing` are names of
    parameters whose expected gradient is zero but for rounding, in any step.
    """

    result: CheckResult
    findings: tuple[Finding, ...] = ()
    limits: Mapping[Key, float] = field(default_factory=dict)
    vanishing: frozenset[str] = frozenset()
    parts: Mapping[Key, Parts] = field(default_factory=dict)
    errors: Mapping[Key, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Judgement:
    """Verdicts of all checks of a case, and their findings ordered by step."""

    checks: tuple[CheckResult, ...]
    findings: tuple[Finding, ...]


class Watch(Generic[R]):
    """Observer of one run on one rank, with a report at the end. The base class records nothing.

    A watch receives each tensor before the comparison does.
    """

    def begin_step(self, step: int) -> None:
        """Handle the start of a step."""

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Handle one shard; see `moeverify.parallel.regions.observer.Observer`."""

    def close(self) -> None:
        """Release the model. Called when the run is over or was aborted."""

    def report(self) -> R:
        """Return this rank's report for rank 0, small and picklable. Called after all runs.

        Collective: all ranks call it, for one check after another in the order of their names.
        """
        raise NotImplementedError


class Check(ABC, Generic[R]):
    """One check. `kinds` are the kinds of logical tensors that it compares with the golden.

    A kind that only this check shows, in `show`, is named after the check. A check that `sees_inside` uses
    module hooks. It is skipped where passes are launched as graphs, because hooks do not run there. A check
    that `recomputes_step` recomputes the results of a step as the recipe defines them. A user's own step
    may define them differently; see `moeverify.verification.golden_run.golden`.
    """

    name: CheckName
    kinds: tuple[str, ...] = ()
    role: Role = Role.DIAGNOSED
    sees_inside: bool = False
    recomputes_step: bool = False

    def show(self, training: Training, observer: Observer) -> Watch[Any] | None:
        """Return a watch that shows additional logical tensors to `observer`; None if the check has none.

        Only optional checks may do this, because these tensors become part of the full golden.
        """
        return None

    def watch(self, run: RankRun, program: TrainingProgram) -> Watch[R] | None:
        """Return a watch that takes notes and reports them on this rank; None if there is nothing to note.

        `Watch.close` must release the program. Otherwise a second run would hold two models in memory.
        """
        return None

    def inspect(self, load: RankLoad) -> R | None:
        """Return this rank's report about a load; None if there is nothing to report."""
        return None

    @abstractmethod
    def judge(self, shown: ShownTensors, reports: Sequence[R]) -> CheckOutcome | None:
        """Return the verdict, on rank 0; None if the check does not apply.

        `reports` has one entry per rank, ordered by rank. It is empty if no rank took notes.
        """


def make_outcome(name: str, findings: Sequence[Finding], num_tensors: int, **rest: Any) -> CheckOutcome:
    """Return the outcome of a check with bound 0. The finding with the largest error is the worst."""
    worst = max(findings, key=lambda finding: comparable(finding.error), default=None)
    result = CheckResult(
        name=name,
        verdict="mismatch" if findings else "pass",
        tensors=num_tensors,
        worst=Worst(tensor=worst.tensor, error=worst.error, bound=0.0, step=worst.step) if worst else None,
        **rest,
    )
    return CheckOutcome(result, tuple(findings))


def rate_error(error: float) -> float:
    """Return an error for ranking: NaN becomes infinity."""
    return math.inf if math.isnan(error) else error
