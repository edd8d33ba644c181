"""Check that a user's own step calls zero_grad, clip and scheduler at the right points of a step.

Applies only to a case with `recipe.step`, on every rank. One device runs a single micro-batch, so a wrong
order among the backward passes may not show there. No numbers are compared: a finding has the line of the
call and no error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.finding import Finding
from moeverify.results.place import Place, Stage
from moeverify.results.script import CallFacts, CallRule
from moeverify.train.calls.call import LoopCall
from moeverify.train.calls.rules import find_discarded, find_inner_schedule, find_kept, find_misplaced_clip
from moeverify.train.custom_step import CustomStep
from moeverify.train.program import TrainingProgram
from moeverify.verification.checks.base import (
    Check,
    CheckOutcome,
    RankRun,
    Role,
    ShownTensors,
    Watch,
    make_outcome,
)

Steps = dict[int, tuple[LoopCall, ...]]

_STAGES = {
    CallRule.DISCARDED: Stage.BACKWARD,
    CallRule.KEPT: Stage.BACKWARD,
    CallRule.EARLY_CLIP: Stage.CLIP,
    CallRule.LATE_CLIP: Stage.CLIP,
    CallRule.INNER_SCHEDULER: Stage.OPTIMIZER_STEP,
}


@dataclass(frozen=True)
class RankCalls:
    """The calls of one rank in each step, and its number of micro-batches."""

    steps: Steps
    num_micro_batches: int


class CallWatch(Watch[RankCalls]):
    """Reports the calls that a user's step made."""

    def __init__(self, step: CustomStep, num_micro_batches: int) -> None:
        self._step = step
        self._num_micro_batches = num_micro_batches

    def report(self) -> RankCalls:
        """Return the calls of every step; see `Watch`."""
        return RankCalls(dict(self._step.calls), self._num_micro_batches)


class Calls(Check[RankCalls]):
    """Order of the calls in a user's own step."""

    name = CheckName.CALLS
    role = Role.ORIGIN

    def watch(self, run: RankRun, program: TrainingProgram) -> Watch[RankCalls] | None:
        """Return a watch that reports the calls; None without a user's own step; see `Check`."""
        step = program.custom_step
        return None if step is None else CallWatch(step, program.num_micro_batches)

    def judge(self, shown: ShownTensors, reports: Sequence[RankCalls]) -> CheckOutcome | None:
        """Return whether every rank follows the rules in every step; see `Check`."""
        return judge_calls(shown, reports) if reports else None


def judge_calls(shown: ShownTensors, reports: Sequence[RankCalls]) -> CheckOutcome:
    """Return the verdict, with one finding per broken rule, at the first step that breaks it."""
    broken: dict[CallRule, tuple[int, CallFacts, list[int]]] = {}
    for rank, report in enumerate(reports):
        for step, calls in sorted(report.steps.items()):
            for facts in _list_broken(calls, report.num_micro_batches):
                known = broken.setdefault(facts.rule, (step, facts, []))
                if rank not in known[2]:
                    known[2].append(rank)
    findings = [_make_finding(shown, *found) for found in broken.values()]
    num_calls = sum(len(calls) for report in reports for calls in report.steps.values())
    return make_outcome(CheckName.CALLS, findings, num_calls)


def _list_broken(calls: Sequence[LoopCall], num_micro_batches: int) -> list[CallFacts]:
    """Return the rules that the calls of a step break.

    The rules assume one backward pass per micro-batch. Algorithms with two, such as sharpness-aware
    minimization, discard the first gradients on purpose; no rule applies to them.
    """
    if sum(call.name == "backward" for call in calls) != num_micro_batches:
        return []
    found = (rule(calls) for rule in (find_discarded, find_kept, find_misplaced_clip, find_inner_schedule))
    return [facts for facts in found if facts is not None]


def _make_finding(shown: ShownTensors, step: int, facts: CallFacts, ranks: Sequence[int]) -> Finding:
    return shown.make_finding(
        CheckName.CALLS,
        (step, "", facts.rule.value),
        ranks,
        error=float(max(facts.actual, 1)),
        facts=facts,
        code=Cause.CALLS,
        place=Place(ranks=tuple(ranks), stage=_STAGES[facts.rule]),
    )


CHECKS = (Calls(),)
