"""Checks and findings, as plain data without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import AliasChoices, Field

from moeverify.results.culprit import Culprit
from moeverify.results.explanation import Explanation
from moeverify.results.factor import Product
from moeverify.results.facts import CheckFacts, Facts, names_operation
from moeverify.results.observation import DiagnosisFailed, Observation
from moeverify.results.parameter_part import ParameterPart
from moeverify.results.place import Place
from moeverify.results.record import Record
from moeverify.results.step_facts import RecomputedFacts
from moeverify.results.trial import Trial

MAX_CONCLUSIVE = 0.5
"""A relative bound above which a comparison is inconclusive: a tensor of zeros would be off by 1."""

Verdict = Literal["pass", "mismatch", "error", "skipped"]


class Worst(Record):
    """The logical tensor of a check whose error is the largest share of its bound.

    `error` and `bound` are relative to the golden's norm unless the check says otherwise; a bound of 0 is
    bitwise equality.
    """

    tensor: str
    error: float
    bound: float
    step: int = -1


class DetectionLimits(Record):
    """The relative errors of tensors from which on a check fails: their median, and the worst with its tensor."""

    median: float
    worst: float
    tensor: str


class Inconclusive(Record):
    """A tensor of which too little is known: an error below `limit`, relative to its norm, may not have been seen."""

    tensor: str
    step: int
    limit: float


class CheckResult(Record):
    """One check of one case: how many logical tensors were compared, and the worst of them.

    `inconclusive` of them (`blind` in JSON) have a bound so wide that the comparison says nothing; each is in
    `inconclusive_tensors`. `recomputed` more have such a bound and were computed again from what the rank started
    from, which decided them. `limits` say how large an error must be to be seen. `note` says how was compared and
    `unseen` what was not looked at, both in words; what they are made of is in `facts`.
    """

    name: str
    verdict: Verdict
    tensors: int
    worst: Worst | None = None
    inconclusive: int = Field(
        default=0, validation_alias=AliasChoices("inconclusive", "blind"), serialization_alias="blind"
    )
    recomputed: int = 0
    inconclusive_tensors: tuple[Inconclusive, ...] = ()
    limits: DetectionLimits | None = None
    facts: CheckFacts | None = None
    note: str = ""
    unseen: str = ""


class FollowUp(Record):
    """An ambiguity: products that explain a finding equally well, and the layout that tells them apart.

    `axes` are the sources in them, `layout` has the degrees to change. Once it has run, `outcome` says what came of
    it: `narrowed` to the products `left`, `none-left`, `not-shown` (the finding is not there), or `not-run` for a
    `reason`; `seen` is what explains the finding there, or what differs instead. `answer` says all this in words,
    and is filled when JSON is written.
    """

    axes: tuple[str, ...]
    layout: dict[str, int]
    candidates: tuple[Product, ...] = ()
    outcome: Literal["", "narrowed", "none-left", "not-shown", "not-run"] = ""
    left: tuple[Product, ...] = ()
    reason: str = ""
    seen: Explanation | None = None
    answer: str = ""


class Wider(Record):
    """What the same layout showed in a wider precision, where a finding had no cause, or only a place.

    `outcome` is `named` (the leading finding there says more of the cause), `alike` (it says no more), `unexplained`
    (it has no cause there either), `not-shown` (nothing differs there: it is a matter of precision), or `not-run`
    for a `reason`. With `found` the finding itself was made there, and the case passes in its own precision.
    """

    precision: str
    outcome: Literal["named", "alike", "unexplained", "not-shown", "not-run", "found"]
    reason: str = ""


class Finding(Record):
    """One thing that differs: what, where, by how much, what was allowed, and the likely cause.

    `kind` is that of the logical tensor (`moeverify.results.checks.Kind`), where it is one. `rank` is the rank with
    the largest difference and `ranks` all that differ; `index` is the global index of the largest difference in the
    logical tensor. `scale` is the factor k that minimizes |actual - k * expected|, `cosine` the angle between them.

    `explanation` is what was found out, `code` the name of its cause (`moeverify.results.cause`), `rivals` what
    explains the numbers too, `observations` what was measured; `unexplained` are the tensors that it stands for
    where no hypothesis explains them, and `part` says which of all parameters a cause is about. `facts` are what the
    check found besides. `follows` names the tensor whose finding explains this one too. Only findings that follow
    from none have `trials` and `place`, and ambiguous ones a `follow_up`. `wider` says what wider precisions have
    shown where there was no cause. `culprit` is the first wrong operation, which leads where it is proved or where
    nothing else is known; a finding that was made there, and names the cause, has one entry for its
    precision.

    `cause`, `where` and `evidence` say this in words: `moeverify.report.words` fills them when JSON is written.
    """

    check: str
    kind: str = ""
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
    facts: Facts | None = None
    follows: str = ""
    explanation: Explanation | None = None
    rivals: tuple[Explanation, ...] = ()
    unexplained: tuple[str, ...] = ()
    observations: tuple[Observation, ...] = ()
    part: ParameterPart | None = None
    place: Place | None = None
    trials: tuple[Trial, ...] = ()
    follow_up: FollowUp | None = None
    wider: tuple[Wider, ...] = ()
    culprit: Culprit | None = None

    @property
    def is_explained(self) -> bool:
        """Return whether a cause is known, as data, by its check, or from a file of an older version as words."""
        return self.explanation is not None or self.culprit is not None or bool(self.code or self.cause)

    @property
    def is_of_wider_run(self) -> bool:
        """Return whether it was made in a wider precision, whose run has named the cause or is alone to show it."""
        return not self.follows and any(each.outcome in ("named", "found") for each in self.wider)

    @property
    def names_operation(self) -> bool:
        """Return whether its cause says what was done, and not alone where or by how much values are off."""
        if self.culprit is not None and self.culprit.leads:
            return self.culprit.proved
        if self.explanation is not None:
            return self.explanation.names_operation
        return self.is_explained and names_operation(self.facts)

    @property
    def is_estimate(self) -> bool:
        """Return whether its cause is one that rounding leaves a guess: a wider run may show an earlier one."""
        if self.explanation is not None:
            return self.explanation.is_estimate
        return isinstance(self.facts, RecomputedFacts) and self.facts.is_estimate


def note_failure(findings: Sequence[Finding], failure: DiagnosisFailed) -> list[Finding]:
    """Return findings that have no causes because their diagnosis failed: the first of them says how."""
    if not findings:
        return []
    first, *rest = findings
    return [first.model_copy(update={"observations": (*first.observations, failure)}), *rest]
