"""Result of a run: verdicts, checks and findings of its cases, as plain data without torch.

`--json` writes `RunResult.model_dump_json()`. Its keys are the interface for other programs;
`SCHEMA_VERSION` increases whenever a key changes its meaning.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from moeverify.results.bound import Bound, NearChoices
from moeverify.results.error_map import ErrorMap
from moeverify.results.failure import STATES, RankEnd, RankState
from moeverify.results.finding import CheckResult, Finding, Verdict
from moeverify.results.load import ExpertLoad
from moeverify.results.measurement import Measurement
from moeverify.results.mesh import MeshShape
from moeverify.results.probe import ProbeRow
from moeverify.results.record import Record, Seconds
from moeverify.results.timeline import Timeline
from moeverify.results.trace import CollectiveRecord

SCHEMA_VERSION = 3
"""From version 3 on, a file ends with its checksum (`moeverify.checksum.seal`)."""


class RankReport(Record):
    """One rank of a failed launch: its end, and the last collective that it issued.

    `summary` and `last_collective` are `end` and `collective` in words. `recent` are the last collectives
    that the rank issued, oldest first, including `collective`.
    """

    rank: int
    state: RankState
    end: RankEnd | None = None
    summary: str = ""
    host: str = ""
    pid: int = 0
    stack: str = ""
    collective: CollectiveRecord | None = None
    last_collective: str = ""
    recent: tuple[CollectiveRecord, ...] = ()

    @classmethod
    def of(cls, rank: int, end: RankEnd, **rest: Any) -> Self:
        """Return the report of a rank with this end, which implies its state."""
        return cls(rank=rank, state=STATES[end.how], end=end, **rest)

    def ending(self, end: RankEnd) -> Self:
        """Return a copy of the report with another end."""
        return self.model_copy(update={"end": end, "state": STATES[end.how]})


class Declared(Record):
    """Checks that a case declares to differ, because its implementation differs from the golden by design.

    `because` is the reason. `differ` are declared checks that differ, and `equal` are those that do not and
    should. `has_more` means that other checks differ.
    """

    names: tuple[str, ...]
    differ: tuple[str, ...] = ()
    equal: tuple[str, ...] = ()
    has_more: bool = False
    because: str = ""


class TimePart(Record):
    """A part of the time of a run or a case.

    Units: `seconds` is wall time.
    """

    name: str
    seconds: float


class CaseResult(Record):
    """The verdict of one case. `seconds` is wall time on the ranks, without the launch.

    `losses` has the total loss of each step as (golden, layout), the values of a loss curve.
    `gradient_norms` and `learning_rates` have the gradient norms and the optimizer's rates in the same
    form. `load` is the expert load, if the routers are observed. A failed case has its `mesh`. A case with
    differences also has the `errors` of all tensors, and the `timeline` of collectives in the step of the
    first difference. `operators` is the file with the operators of both sides in that step, if the run was
    saved to a folder.

    An undecided case has the `reason` in words. `decided_in` is the wider precision whose run decided a pass
    that the case's own precision leaves undecided. `bounds` says where bounds come from, and `choices` which
    choices rounding may flip in them. `stages` are parts of `seconds` on rank 0.

    For a pair of `moeverify reshard`, `saved_by` and `loaded_by` are its two cases, and `saver_file` is the
    file of the first.
    """

    name: str
    file: str
    verdict: Verdict
    reason: str = ""
    ranks: int
    seconds: Seconds
    recipe: str = ""
    layout: str = ""
    checks: tuple[CheckResult, ...] = ()
    findings: tuple[Finding, ...] = ()
    rank_reports: tuple[RankReport, ...] = ()
    losses: tuple[tuple[float, float], ...] = ()
    load: ExpertLoad | None = None
    gradient_norms: tuple[tuple[float, float], ...] = ()
    learning_rates: tuple[tuple[float, float], ...] = ()
    mesh: MeshShape | None = None
    errors: tuple[ErrorMap, ...] = ()
    timeline: Timeline | None = None
    notes: tuple[str, ...] = ()
    saved_by: str = ""
    loaded_by: str = ""
    saver_file: str = ""
    operators: str = ""
    decided_in: str = ""
    stages: tuple[TimePart, ...] = ()
    bounds: tuple[Bound, ...] = ()
    choices: NearChoices | None = None

    @property
    def has_failed(self) -> bool:
        """Return whether anything differs, or a rank was lost."""
        return self.verdict in ("error", "mismatch")

    @property
    def lead(self) -> Finding | None:
        """Return the first finding that follows from no other; it leads the report."""
        return next((finding for finding in self.findings if not finding.follows), None)


class GoldenTime(Record):
    """A golden that one device made for this run, with its time in seconds including the calibration."""

    recipe: str
    seconds: Seconds


class RunResult(Record):
    """A whole run: its options, its environment and its cases.

    `goldens` are the goldens that this run made; others came from the cache. `start_seconds` is the time
    from each launch to its first job. `allows_undecided` means that an undecided case is no failure.
    `waiting` are the cases without a result while the run goes on; its verdict is `error` until it ends.
    """

    schema_version: int = SCHEMA_VERSION
    verdict: Literal["pass", "mismatch", "undecided", "error"]
    environment: dict[str, str]
    command: str = ""
    started: str = ""
    seconds: Seconds = 0.0
    launches: int = 0
    start_seconds: float = 0.0
    goldens: tuple[GoldenTime, ...] = ()
    allows_undecided: bool = False
    waiting: tuple[str, ...] = ()
    cases: tuple[CaseResult, ...]

    def answered(self, cases: tuple[CaseResult, ...], answers: RunResult) -> RunResult:
        """Return this run with updated `cases`, plus the launches, goldens and time of the follow-up runs."""
        return self.model_copy(
            update={
                "cases": cases,
                "launches": self.launches + answers.launches,
                "start_seconds": self.start_seconds + answers.start_seconds,
                "goldens": (*self.goldens, *answers.goldens),
                "seconds": self.seconds + answers.seconds,
            }
        )


class Event(Record):
    """An event during a run, for a progress view; `num_done` of `num_total` cases are finished.

    `launch`: `num_ranks` ranks are started. `up`: they run. `lost`: some ranks are lost, and further cases
    need new ones. `golden`: the goldens of `recipes` are made. `golden-end`: the one of the recipe `case` is
    there, and `num_done` and `num_total` count goldens. `case-start` and `case-end` concern `case`; in `bench`,
    `measured` is its measurement, and in `doctor` `row` its row. `work` is other work, which `note` describes; for
    a case, `note` is a further text, such as the steps that are left.
    """

    kind: Literal["launch", "up", "lost", "golden", "golden-end", "case-start", "case-end", "work"]
    num_done: int = 0
    num_total: int = 0
    case: str = ""
    num_ranks: int = 0
    recipes: tuple[str, ...] = ()
    result: CaseResult | None = None
    measured: Measurement | None = None
    row: ProbeRow | None = None
    note: str = ""
