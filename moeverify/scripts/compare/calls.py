"""Check of the order in which a training loop calls the optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from moeverify.results.checks import Kind
from moeverify.results.finding import Finding, make_finding
from moeverify.results.script import CallFacts, CallRule, ScriptCheck
from moeverify.scripts.record.read import RankRecord, RecordedRun
from moeverify.train.calls.call import LoopCall
from moeverify.train.calls.rules import (
    backward_range,
    clips,
    drop_skipped,
    find_discarded,
    find_emptied,
    find_eval,
    find_misplaced_clip,
    find_scaled_clip,
    find_scaled_step,
)


def find_wrong_calls(expected: RecordedRun, actual: RecordedRun, steps: list[int]) -> Iterator[Finding]:
    """Yield a finding for each rule that the calls of `actual` break, at the first step that breaks it.

    A broken rule is an error in any run. Numbers of calls are compared only if both runs make such calls.
    Numbers of forward and backward passes are never compared: ranks may have other micro-batches than one
    device.
    """
    for rule in _RULES:
        # Calls after an optimizer step belong to the next step, so the first step lacks a part of its
        # calls.
        counted = steps[1:] if rule is CallRule.SCHEDULER and len(steps) > 1 else steps
        found = next((each for step in counted for each in _test(rule, expected, actual, step)), None)
        if found is not None:
            yield found if rule is not CallRule.SCHEDULER else found.model_copy(update={"step": steps[0]})


def _test(rule: CallRule, expected: RecordedRun, actual: RecordedRun, step: int) -> Iterator[Finding]:
    for rank in actual.ranks:
        # Several optimizers share a backward pass, and zero gradients that another optimizer's loss has
        # left.
        if rule in _OF_ONE_OPTIMIZER and not _has_one_optimizer(rank, step):
            continue
        if rule is CallRule.EMPTIED and _has_gradients(rank, step):
            continue
        facts = _break(rule, calls_of(expected.ranks[0], step), calls_of(rank, step))
        if facts is not None:
            ranks, error = tuple(each.rank for each in actual.ranks), abs(facts.actual - facts.expected) or 1
            yield make_finding(ScriptCheck.CALLS, rule.value, step, ranks, facts, error=error, rank=rank.rank)
            return


def _has_one_optimizer(rank: RankRecord, step: int) -> bool:
    groups = [(each.optimizer, each.number) for each in rank.options if each.step == step]
    return len({name for name, _ in groups}) <= 1 and len(set(groups)) == len(groups)


def _has_gradients(rank: RankRecord, step: int) -> bool:
    """Return whether any optimizer got a nonzero gradient."""
    return any(
        line.squares > 0.0
        for (at, kind, _), line in rank.values.items()
        if (at, kind) == (step, Kind.GRADIENT) and not line.is_absent
    )


def calls_of(rank: RankRecord, step: int) -> list[LoopCall]:
    """Return the calls after the previous optimizer step, up to and including this one."""
    return [call for call in rank.calls if call.step == step]


def _break(rule: CallRule, theirs: list[LoopCall], calls: list[LoopCall]) -> CallFacts | None:
    """Return the violation of a rule by these calls, or None."""
    # A scaler may skip the optimizer step, and the gradients are then discarded on purpose.
    theirs, calls = list(drop_skipped(theirs)), list(drop_skipped(calls))
    if not any(call.name == "backward" for call in calls):
        return None
    return _RULES[rule](theirs, calls)


def _find_kept(theirs: list[LoopCall], calls: list[LoopCall]) -> CallFacts | None:
    def clears(each: list[LoopCall]) -> bool:
        return any(call.name == "zero_grad" for call in each[: backward_range(each)[0]])

    # zero_grad after the last backward pass discards the wrong gradients, but keeps none of the previous
    # step.
    is_late = any(call.name == "zero_grad" for call in calls[backward_range(calls)[1] :])
    if not clears(theirs) or clears(calls) or is_late:
        return None
    return CallFacts(rule=CallRule.KEPT, site=calls[backward_range(calls)[0]].site, expected=1)


def _find_other_schedule(theirs: list[LoopCall], calls: list[LoopCall]) -> CallFacts | None:
    wanted, found = ([call for call in each if call.name == "scheduler step"] for each in (theirs, calls))
    if len(wanted) == len(found):
        return None
    site = found[0].site if found else ""
    return CallFacts(rule=CallRule.SCHEDULER, site=site, expected=len(wanted), actual=len(found))


def _find_other_clip(theirs: list[LoopCall], calls: list[LoopCall]) -> CallFacts | None:
    """Return clips in one run only, or one call that clips the same parameters more often than any of RUN_A.

    Numbers of clips may differ: a script may clip the parameters of each mesh apart.
    """
    wanted, found = _count_repeated_clips(theirs), _count_repeated_clips(calls)
    if wanted == found or find_misplaced_clip(calls) is not None:
        return None
    site = next((call.site for call in calls if clips(call)), "")
    return CallFacts(rule=CallRule.CLIP, site=site, expected=wanted, actual=found)


def _count_repeated_clips(calls: list[LoopCall]) -> int:
    counts = Counter((call.site, call.target) for call in calls if clips(call))
    return max(counts.values(), default=0)


def _count_clips(facts: CallFacts | None, theirs: list[LoopCall]) -> CallFacts | None:
    return None if facts is None else facts.model_copy(update={"expected": _count_repeated_clips(theirs)})


_OF_ONE_OPTIMIZER = (CallRule.DISCARDED, CallRule.EMPTIED)
_RULES: Mapping[CallRule, Callable[[list[LoopCall], list[LoopCall]], CallFacts | None]] = {
    CallRule.DISCARDED: lambda theirs, calls: find_discarded(calls),
    CallRule.EMPTIED: lambda theirs, calls: find_emptied(calls),
    CallRule.KEPT: _find_kept,
    CallRule.EARLY_CLIP: lambda theirs, calls: _count_clips(find_misplaced_clip(calls), theirs),
    CallRule.SCALED_CLIP: lambda theirs, calls: find_scaled_clip(calls),
    CallRule.SCALED_STEP: lambda theirs, calls: find_scaled_step(calls),
    CallRule.EVAL: lambda theirs, calls: find_eval(calls) if find_eval(theirs) is None else None,
    CallRule.SCHEDULER: _find_other_schedule,
    CallRule.CLIP: _find_other_clip,
}
