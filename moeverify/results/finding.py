"""Checks and findings as plain data, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import AliasChoices, Field, model_validator

from moeverify.results.culprit import Culprit, Origin, find_lone_line
from moeverify.results.decided import Decided
from moeverify.results.explanation import Explanation
from moeverify.results.factor import Product
from moeverify.results.facts import CheckFacts, Facts, names_operation
from moeverify.results.observation import DiagnosisFailed, NoValues, Observation
from moeverify.results.place import Place, UserCall
from moeverify.results.record import Record
from moeverify.results.step_facts import RecomputedFacts

MAX_CONCLUSIVE = 0.5
"""The relative bound above which a comparison is inconclusive; a tensor of zeros has an error of 1."""

Verdict = Literal["pass", "mismatch", "undecided", "error", "skipped"]


class Worst(Record):
    """The logical tensor of a check whose error is the largest share of its bound.

    `error` and `bound` are relative to the norm of the golden unless the check defines them differently. A
    bound of 0 requires bitwise equality.
    """

    tensor: str
    error: float
    bound: float
    step: int = -1


class DetectionLimits(Record):
    """The relative errors above which the tensors of a check fail: the median, and the worst tensor."""

    median: float
    worst: float
    tensor: str


class Inconclusive(Record):
    """A tensor with a bound too wide: a relative error below `limit` may go unnoticed."""

    tensor: str
    step: int
    limit: float


class CheckResult(Record):
    """The result of one check of one case: the number of compared logical tensors and the worst of them.

    `inconclusive` tensors (`blind` in JSON) have a bound too wide to be conclusive; `inconclusive_tensors`
    lists them. `recomputed` more tensors also have such a bound, but a recomputation from the rank's own
    inputs decided them. `limits` are the smallest errors that the check detects, and `decided` counts the
    tensors of which a pass needs evidence. `note` describes the comparison in words, and `unseen` the things
    that were not compared; `facts` is the data behind both.
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
    decided: Decided | None = None
    facts: CheckFacts | None = None
    note: str = ""
    unseen: str = ""


class FollowUp(Record):
    """An ambiguity: products that explain a finding equally well, and a layout that distinguishes them.

    `axes` are the sources in the products, and `layout` has the degrees to change. After the run of that
    layout, `outcome` is one of

    - `narrowed`: the products in `left` remain
    - `none-left`: no product remains
    - `not-shown`: the finding does not appear
    - `not-run`: for the given `reason`

    `seen` is the explanation of the finding in that run, or of another difference. `answer` has all of this
    in words; it is filled when JSON is written.
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
    """The result of the same layout in a wider precision, for a finding with no cause or only a place.

    `outcome` is one of

    - `named`: the leading finding says more about the cause
    - `alike`: the leading finding says no more
    - `unexplained`: the finding has no cause there either
    - `not-shown`: nothing differs there, so the precision is the reason
    - `not-run`: for the given `reason`
    - `found`: the finding was made there, and the case passes in its own precision
    """

    precision: str
    outcome: Literal["named", "alike", "unexplained", "not-shown", "not-run", "found"]
    reason: str = ""


class Finding(Record):
    """One difference: its tensor, location, error, bound and likely cause.

    `kind` is the kind of the logical tensor (`moeverify.results.checks.Kind`), or empty. `rank` has the
    largest difference, and `ranks` are all ranks that differ. `index` is the global index of the largest
    difference in the logical tensor. `scale` is the factor k that minimizes |actual - k * expected|.
    `cosine` is the cosine of the angle between actual and expected values.

    `explanation` is the result of the diagnosis, and `code` the name of its cause
    (`moeverify.results.cause`). `rivals` explain the numbers too. `observations` are the measurements.
    `unexplained` lists the tensors that this finding represents if no hypothesis explains them. `facts`
    are additional results of the check.

    `follows` names the tensor whose finding also explains this one. Only findings that follow from no other
    have a `place`; ambiguous ones have a `follow_up`. `wider` has the results of wider
    precisions for a finding without a cause. If the finding itself comes from a wider run and names the
    cause, it has one entry, for that precision. `culprit` is the first wrong operation. It leads the report
    if it is proved or if nothing else is known. `sites` are lines of a watched script, the most important
    one first, and `origins` those from which the difference may come.

    `cause`, `where` and `evidence` are the same in words: `moeverify.report.words` fills them when JSON is
    written.
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
    place: Place | None = None
    sites: tuple[UserCall, ...] = ()
    origins: tuple[Origin, ...] = ()
    follow_up: FollowUp | None = None
    wider: tuple[Wider, ...] = ()
    culprit: Culprit | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_old_keys(cls, data: Any) -> Any:
        """Drop keys of older versions: the tests of all hypotheses, and the affected part."""
        if not isinstance(data, dict):  # a damaged file, which pydantic refuses
            return data
        return {key: value for key, value in data.items() if key not in ("trials", "part")}

    @property
    def lone_line(self) -> Origin | None:
        """The only line before a difference without a cause that one device does not execute, or None."""
        is_open = not self.code and self.explanation is None and self.culprit is None
        return find_lone_line(self.origins) if is_open else None

    @property
    def is_explained(self) -> bool:
        """Return whether a cause is known.

        The cause may be data, come from the check, or be words in a file of an older version.
        """
        return self.explanation is not None or self.culprit is not None or bool(self.code or self.cause)

    @property
    def is_of_wider_run(self) -> bool:
        """Return whether a run in a wider precision made the finding.

        Such a run has named the cause, or is the only one that shows the error.
        """
        return not self.follows and any(each.outcome in ("named", "found") for each in self.wider)

    @property
    def names_operation(self) -> bool:
        """Return whether the cause names an operation, not only the location or size of the error."""
        if self.culprit is not None and self.culprit.leads:
            return self.culprit.proved
        if self.explanation is not None:
            return self.explanation.names_operation
        return self.is_explained and names_operation(self.facts)

    @property
    def is_estimate(self) -> bool:
        """Return whether rounding makes the cause a guess, so that a wider run may show an earlier one."""
        if self.explanation is not None:
            return self.explanation.is_estimate
        return isinstance(self.facts, RecomputedFacts) and self.facts.is_estimate


def make_finding(
    check: str,
    tensor: str,
    step: int,
    ranks: tuple[int, ...],
    facts: Facts,
    *,
    error: float = 1.0,
    bound: float = 0.0,
    rank: int | None = None,
    **fields: Any,
) -> Finding:
    """Return a finding of ranks of which the last one, or `rank`, has the largest difference.

    `fields` are other fields of the finding.
    """
    worst = ranks[-1] if rank is None else rank
    return Finding(
        check=check,
        tensor=tensor,
        step=step,
        rank=worst,
        ranks=ranks,
        error=error,
        bound=bound,
        facts=facts,
        **fields,
    )


def find_undecided(checks: Sequence[CheckResult]) -> list[CheckResult]:
    """Return the checks that decide too few of their tensors for a pass."""
    return [check for check in checks if check.decided is not None and not check.decided.is_enough]


def note_failure(findings: Sequence[Finding], failure: DiagnosisFailed | NoValues) -> list[Finding]:
    """Return findings without a diagnosis, with the reason added to the observations of the first one."""
    if not findings:
        return []
    first, *rest = findings
    return [first.model_copy(update={"observations": (*first.observations, failure)}), *rest]
