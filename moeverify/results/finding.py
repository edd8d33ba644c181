"""What differs and how much: checks, findings, places and what was tried, as plain data without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field

from moeverify.results.facts import CheckFacts, Facts
from moeverify.results.record import Record

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


class CheckResult(Record):
    """One check of one case: how many logical tensors were compared, and the worst of them.

    `inconclusive` of them (`blind` in JSON) have a bound so wide that the comparison says nothing. `note` says how
    was compared and `unseen` what was not looked at, both in words; what they are made of is in `facts`.
    """

    name: str
    verdict: Verdict
    tensors: int
    worst: Worst | None = None
    inconclusive: int = Field(
        default=0, validation_alias=AliasChoices("inconclusive", "blind"), serialization_alias="blind"
    )
    facts: CheckFacts | None = None
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
    (`moeverify.results.cause`). `follows` names the tensor whose finding explains this one too. Only findings
    that follow from none have `trials` and `place`, and those that are ambiguous a `follow_up`. `kind` is that of
    the logical tensor (`moeverify.results.checks.Kind`), where it is one; `facts` are what the check found besides.
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
    place: Place | None = None
    trials: tuple[Trial, ...] = ()
    follow_up: FollowUp | None = None
