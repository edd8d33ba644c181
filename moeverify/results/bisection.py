"""The verdicts of one case over commits or over smaller cases, and the results of searches by them. No torch."""

from __future__ import annotations

from typing import Literal

from moeverify.results.finding import Verdict
from moeverify.results.record import Record, Seconds


class CommitJudgement(Record):
    """The verdict of a case and its leading finding, short enough to be kept for every commit of a history.

    `check`, `tensor` and `code` are those of the finding, `cause` is in words, and `line` is
    `file:line: expression` of the first wrong operation. `is_proved` means that a repair of this line made the
    results right. `reason` says why there is no verdict.
    """

    verdict: Verdict
    check: str = ""
    tensor: str = ""
    code: str = ""
    cause: str = ""
    line: str = ""
    is_proved: bool = False
    reason: str = ""
    seconds: Seconds = 0.0

    @property
    def summary(self) -> str:
        """Return the check and tensor of a mismatch, or else the reason; empty for a pass."""
        return f"{self.check} of {self.tensor}" if self.verdict == "mismatch" else self.reason

    @property
    def headline(self) -> str:
        """Return the finding with its cause, or the reason, in one line; empty for a pass."""
        if self.reason or self.verdict != "mismatch":
            return self.reason
        return ": ".join(part for part in (self.summary, self.cause) if part)


class Commit(Record):
    """A commit of git; `date` is the author's, in ISO 8601."""

    hash: str
    date: str
    author: str
    subject: str


class JudgedCommit(Record):
    """A commit with its judgement. `is_known` means that an earlier command had judged the same content."""

    commit: Commit
    judgement: CommitJudgement
    is_known: bool = False


class Bisection(Record):
    """The result of `moeverify bisect`.

    With the outcome `found`, `first_bad` is the first bad commit, `files` are the files that it changed as
    `git diff --name-status` lists them, and `judgement` is its verdict. With `skipped`, one of `candidates`
    is the first bad commit, and all of these but the last could not be judged.
    """

    kind: Literal["bisection"] = "bisection"
    outcome: Literal["found", "skipped"]
    good: Commit
    bad: Commit
    first_bad: Commit | None = None
    judgement: CommitJudgement | None = None
    files: tuple[str, ...] = ()
    candidates: tuple[Commit, ...] = ()
    judged: tuple[JudgedCommit, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: Seconds = 0.0
