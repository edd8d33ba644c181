"""The search for the commit that made a case fail: git chooses commits, a judge runs the case on each.

Does not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moeverify.errors import CaseError, Problem
from moeverify.report.numbers import format_count, format_seconds
from moeverify.results.bisection import Bisection, Commit, CommitJudgement, JudgedCommit
from moeverify.results.run import CaseResult, Event
from moeverify.verification.controller.git_history import GitBisection, Repository

Judge = Callable[[Sequence[str]], Mapping[str, JudgedCommit]]
"""Function that returns the judgement of each of several commits; it may judge them in parallel."""

_FAILED = ("mismatch", "error")
_SHORT = 10  # hex digits of a hash


@dataclass
class CommitSearch:
    """One search in the history of a repository; `folder` is an empty worktree for the state of git.

    `on_event` receives an event for each commit that is judged. `num_jobs` commits are judged concurrently:
    the next one, and its successors for either verdict.
    """

    repository: Repository
    folder: Path
    judge: Judge
    on_event: Callable[[Event], None]
    num_jobs: int = 1
    judged: dict[str, JudgedCommit] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)

    def find(self, good: str, bad: str) -> Bisection:
        """Return the first bad commit after `good`, an ancestor of `bad` or of a merge base with it.

        Raises: CaseError if `good` or `bad` gets the wrong verdict, or if git cannot go on.
        """
        bisection = GitBisection(self.repository, self.folder)
        kind = self._check_ends(good, bad)
        bisection.start(good, bad)
        while not bisection.first_bad and not bisection.candidates:
            commit = bisection.next
            if commit not in self.judged:
                wanted = bisection.look_ahead(self.num_jobs) if self.num_jobs > 1 else [commit]
                self._judge([each for each in wanted if each not in self.judged], bisection)
            bisection.mark(_name_term(self.judged[commit].judgement, kind), commit)
        return self._make_result(good, bad, bisection)

    def _check_ends(self, good: str, bad: str) -> str:
        """Judge both ends, and return the verdict of the bad one: `mismatch` or `error`."""
        if good == bad or self.repository.is_ancestor(bad, good):
            message = "BAD is not after GOOD in the history"
            raise CaseError([Problem(message, path="GOOD..BAD", remedy="write the older commit first")])
        if self.num_jobs > 1:
            self._judge([bad, good], None)
        for commit in (bad, good):
            if commit not in self.judged:
                self._judge([commit], None)
            problem = _examine_end(self.judged[commit], is_bad=commit == bad)
            if problem is not None:
                raise CaseError([problem])
        return self.judged[bad].judgement.verdict

    def _judge(self, commits: Sequence[str], bisection: GitBisection | None) -> None:
        left = self._describe_left(bisection)
        described = {each: self.repository.describe(each) for each in commits}
        for each in commits:
            self._emit("case-start", described[each], left)
        for commit, found in self.judge(commits).items():
            self.judged[commit] = found
            self._emit(
                "case-end", found.commit, "known from before" if found.is_known else "", found.judgement
            )

    def _describe_left(self, bisection: GitBisection | None) -> str:
        """Return how many steps are left, with the time that they take if it was measured."""
        if bisection is None:
            return "an end of the range"
        num_commits, num_steps = bisection.estimate()
        text = f"{format_count(num_commits, 'commit')}, about {format_count(num_steps, 'step')} left"
        measured = [each.judgement.seconds for each in self.judged.values() if not each.is_known]
        if not measured:
            return text
        seconds = num_steps * sum(measured) / len(measured)
        return f"{text}, about {format_seconds(float(round(seconds)))}"

    def _emit(self, kind: str, commit: Commit, note: str, judgement: CommitJudgement | None = None) -> None:
        name = f"{commit.hash[:_SHORT]} {commit.subject}"
        result = None
        if judgement is not None:
            verdict = "skipped" if judgement.verdict == "undecided" else judgement.verdict
            reason = "; ".join(part for part in (judgement.summary, note) if part)
            result = CaseResult(
                name=name, file="", verdict=verdict, reason=reason, ranks=0, seconds=judgement.seconds
            )
        self.on_event(
            Event.model_validate(
                {"kind": kind, "case": name, "note": note, "result": result, "num_done": len(self.judged)}
            )
        )

    def _make_result(self, good: str, bad: str, bisection: GitBisection) -> Bisection:
        describe = self.repository.describe
        first = bisection.first_bad
        found = self.judged.get(first)
        end = self.judged[bad].judgement
        if found is not None and (found.judgement.check, found.judgement.code) != (end.check, end.code):
            note = f"the first finding of BAD is another one: {end.headline}"
            self.notes.append(note)
        return Bisection(
            outcome="found" if first else "skipped",
            good=describe(good),
            bad=describe(bad),
            first_bad=describe(first) if first else None,
            judgement=found.judgement if found is not None else None,
            files=self.repository.list_changes(first) if first else (),
            candidates=() if first else tuple(map(describe, bisection.candidates)),
            judged=tuple(self.judged.values()),
            notes=tuple(self.notes),
            seconds=round(time.monotonic() - self._started, 1),
        )


def _name_term(judgement: CommitJudgement, kind: str) -> str:
    """Return the word of `git bisect` for a verdict. A failure other than that of BAD decides nothing."""
    if judgement.verdict == "pass":
        return "good"
    return "bad" if judgement.verdict == kind else "skip"


def _examine_end(end: JudgedCommit, *, is_bad: bool) -> Problem | None:
    """Return why a commit cannot be an end of the search, or None."""
    judgement, name = end.judgement, f"{end.commit.hash[:_SHORT]} ({end.commit.subject})"
    if is_bad and judgement.verdict == "pass":
        remedy = "name a commit on which it fails; uncommitted changes are in no commit"
        return Problem(f"the case passes on BAD, {name}", path="GOOD..BAD", remedy=remedy)
    if not is_bad and judgement.verdict in _FAILED:
        message = f"the case fails on GOOD, {name}, too: {judgement.headline}"
        return Problem(message, path="GOOD..BAD", remedy="name an older commit as GOOD")
    if judgement.verdict not in ("pass", *_FAILED):
        side = "BAD" if is_bad else "GOOD"
        message = f"{side}, {name}, cannot be judged: {judgement.reason or judgement.verdict}"
        return Problem(
            message, path="GOOD..BAD", remedy="name a commit on which `moeverify run` has a verdict"
        )
    return None
