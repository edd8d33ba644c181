"""What a run says: the verdicts, checks and findings of its cases, as plain data without torch.

`RunResult.model_dump_json()` is what `--json` writes; its keys are the interface for other programs, and
`SCHEMA_VERSION` grows whenever one of them changes its meaning.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1

BLIND = 0.5
"""A relative bound above which a comparison says nothing: a tensor of zeros would be off by 1."""

Verdict = Literal["pass", "mismatch", "error", "skipped"]


class Record(BaseModel):
    """Immutable data with known fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Worst(Record):
    """The logical tensor of a check whose error is the largest share of its bound.

    `error` and `bound` are relative to the golden's norm unless the check says otherwise; a bound of 0 is
    bitwise equality.
    """

    tensor: str
    error: float
    bound: float
    step: int = -1


class CheckResult(Record):
    """One check of one case: how many logical tensors were compared, and the worst of them.

    `blind` of them have a bound so wide that the comparison says nothing. `unseen` says what else was not looked at.
    """

    name: str
    verdict: Verdict
    tensors: int
    worst: Worst | None = None
    blind: int = 0
    note: str = ""
    unseen: str = ""


class Trial(Record):
    """One test of what could have made a tensor wrong, and what it said.

    `coefficients` are those of the golden's parts, by part: all ones is the golden. `residual` is what the
    hypothesis leaves, as a share of the error for a fit and of the tensor otherwise. A test that had nothing to
    look at, or that a simpler answer made needless, is `untried`, and `words` say why.
    """

    name: str
    verdict: Literal["yes", "no", "untried"]
    words: str
    coefficients: dict[str, float] = Field(default_factory=dict)
    residual: float | None = None


class Place(Record):
    """Where a finding acts: a module, the ranks that are wrong, the mesh axes that explain it.

    `collectives` says which collectives the worst rank issued inside the module, in each direction; a module
    without any is told by the nearest one around it that has some.
    """

    module: str = ""
    ranks: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()


class FollowUp(Record):
    """An ambiguity: axes that explain a finding equally well, and the layout that tells them apart.

    `layout` has the degrees to change; `answer` is what came of it, once it has run.
    """

    axes: tuple[str, ...]
    layout: dict[str, int]
    answer: str = ""


class Finding(Record):
    """One thing that differs: what, where, by how much, what was allowed, and the likely cause.

    `rank` is the rank with the largest difference and `ranks` all that differ; `index` is the global index
    of the largest difference in the logical tensor. `scale` is the factor k that minimizes
    |actual - k * expected|, `cosine` the angle between the two. `cause` is a sentence and `code` its name
    (`moeverify.diagnose.cause`). `follows` names the tensor whose finding explains this one too. Only findings
    that follow from none have `trials` and `place`, and those that are ambiguous a `follow_up`.
    """

    check: str
    tensor: str
    step: int
    rank: int
    ranks: tuple[int, ...] = ()
    coordinates: dict[str, int] = Field(default_factory=dict)
    error: float
    bound: float
    scale: float | None = None
    cosine: float | None = None
    index: tuple[int, ...] = ()
    expected: float | None = None
    actual: float | None = None
    cause: str = ""
    code: str = ""
    where: str = ""
    evidence: tuple[str, ...] = ()
    follows: str = ""
    place: Place | None = None
    trials: tuple[Trial, ...] = ()
    follow_up: FollowUp | None = None


class RankReport(Record):
    """What is known of one rank of a launch that failed."""

    rank: int
    state: Literal["raised", "killed", "hung", "stopped", "lost"]
    summary: str
    host: str = ""
    pid: int = 0
    stack: str = ""
    last_collective: str = ""


class CaseResult(Record):
    """The verdict of one case. `seconds` is wall time on the ranks, without the launch.

    `losses` has (golden, layout) total loss of each step: what a look at loss curves would compare. Of a pair of
    `moeverify reshard`, `saved_by` and `loaded_by` are its two cases, and `saver_file` is where the first stands.
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
    notes: tuple[str, ...] = ()
    saved_by: str = ""
    loaded_by: str = ""
    saver_file: str = ""


class RunResult(Record):
    """A whole run: what was asked, on what, and what came of each case."""

    schema_version: int = SCHEMA_VERSION
    verdict: Literal["pass", "mismatch", "error"]
    environment: dict[str, str]
    command: str = ""
    started: str = ""
    seconds: float = 0.0
    launches: int = 0
    cases: tuple[CaseResult, ...]


class Event(Record):
    """Something that happened during a run, for a progress view; `num_done` of `num_total` cases are over."""

    kind: Literal["launch", "golden", "case-start", "case-end"]
    num_done: int = 0
    num_total: int = 0
    case: str = ""
    detail: str = ""
    result: CaseResult | None = None
