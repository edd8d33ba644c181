"""The result of a run: verdicts, checks and findings of its cases, as plain data without torch.

`RunResult.model_dump_json()` is what `--json` writes; its keys are the interface for other programs, and
`SCHEMA_VERSION` grows whenever one of them changes its meaning.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from moeverify.results.error_map import ErrorMap
from moeverify.results.failure import STATES, RankEnd, RankState
from moeverify.results.finding import CheckResult, Finding, Verdict
from moeverify.results.load import ExpertLoad
from moeverify.results.measurement import Measurement
from moeverify.results.mesh import MeshShape
from moeverify.results.record import Record
from moeverify.results.timeline import Timeline
from moeverify.results.trace import CollectiveRecord

SCHEMA_VERSION = 2


class RankReport(Record):
    """One rank of a launch that failed: how it ended, and the last collective that it issued.

    `summary` and `last_collective` say in words what `end` and `collective` are. `recent` are the collectives that it
    issued last, oldest first, `collective` among them.
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
        """Return the report of a rank that ended so, which implies its state."""
        return cls(rank=rank, state=STATES[end.how], end=end, **rest)

    def ending(self, end: RankEnd) -> Self:
        """Return the report with another end."""
        return self.model_copy(update={"end": end, "state": STATES[end.how]})


class Declared(Record):
    """Checks that a case declares to differ: what implements it means something else than the golden, `because`.

    `equal` are declared and do not differ; `has_more` says that others differ too.
    """

    names: tuple[str, ...]
    equal: tuple[str, ...] = ()
    has_more: bool = False
    because: str = ""


class CaseResult(Record):
    """The verdict of one case. `seconds` is wall time on the ranks, without the launch.

    `losses` has (golden, layout) total loss of each step: what a look at loss curves would compare; `gradient_norms`
    has the norms of all gradients and `learning_rates` the optimizer's rates likewise. `load` is that of the experts,
    where routers are seen. A case that failed has its `mesh`, and one in which something differs the `errors` of all
    tensors and the `timeline` of the collectives of the step where it began. Of a pair of `moeverify reshard`,
    `saved_by` and `loaded_by` are its two cases, and `saver_file` is where the first stands. `operators` is the file
    with the operators of both sides in the step where it began, where the run was kept in a folder.
    """

    name: str
    file: str
    verdict: Verdict
    reason: str = ""
    ranks: int
    seconds: float
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

    @property
    def has_failed(self) -> bool:
        """Return whether something differs, or a rank was lost."""
        return self.verdict in ("error", "mismatch")

    @property
    def lead(self) -> Finding | None:
        """Return the first finding that follows from none, which leads the report."""
        return next((finding for finding in self.findings if not finding.follows), None)


class GoldenTime(Record):
    """A golden that one device made for this run and in how many seconds, its noise included."""

    recipe: str
    seconds: float


class RunResult(Record):
    """A whole run: what was asked, on what, and what came of each case.

    `goldens` are those that were made; others were kept from earlier runs.
    """

    schema_version: int = SCHEMA_VERSION
    verdict: Literal["pass", "mismatch", "error"]
    environment: dict[str, str]
    command: str = ""
    started: str = ""
    seconds: float = 0.0
    launches: int = 0
    goldens: tuple[GoldenTime, ...] = ()
    cases: tuple[CaseResult, ...]

    def answered(self, cases: tuple[CaseResult, ...], answers: RunResult) -> RunResult:
        """Return this run with what further runs have said of its cases, and with what these runs took."""
        return self.model_copy(
            update={
                "cases": cases,
                "launches": self.launches + answers.launches,
                "goldens": (*self.goldens, *answers.goldens),
                "seconds": self.seconds + answers.seconds,
            }
        )


class Event(Record):
    """Something that happened during a run, for a progress view; `num_done` of `num_total` cases are over.

    `launch`: `num_ranks` ranks are started; `up`: they run; `lost`: some are gone, and further cases need new
    ones; `golden`: those of `recipes` are had; the rest is about a `case`, of which `bench` has what was `measured`.
    """

    kind: Literal["launch", "up", "lost", "golden", "case-start", "case-end"]
    num_done: int = 0
    num_total: int = 0
    case: str = ""
    num_ranks: int = 0
    recipes: tuple[str, ...] = ()
    result: CaseResult | None = None
    measured: Measurement | None = None
