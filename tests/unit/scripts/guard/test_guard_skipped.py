"""A rank that skips optimizer steps: one finding, and no consequences of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeverify.results.finding import Finding, make_finding
from moeverify.results.guard import GuardCheck
from moeverify.results.script import CallFacts, CallRule, ScriptCheck
from moeverify.scripts.guard.exchange import RankOutbox
from moeverify.scripts.guard.judge import Judge
from moeverify.scripts.guard.lines import RankHeader, StepRecord, TensorLine
from moeverify.train.calls.call import LoopCall

TENSOR = TensorLine(name="dense", shape=(4, 4), region="0:4,0:4", is_whole=True, eps=2.0**-23)


def make_consequence(step: int) -> Finding:
    facts = CallFacts(rule=CallRule.DISCARDED, site="train.py:9", actual=1, norm=1.0)
    return make_finding(ScriptCheck.CALLS, "discarded", step, (1,), facts, error=1.0)


def leave(out: Path, counts: tuple[int, int], *, differ: bool) -> None:
    """Write two steps of two data-parallel ranks, after these numbers of backward passes."""
    for rank in (0, 1):
        outbox = RankOutbox(out, rank)
        outbox.put_header(RankHeader(rank=rank, world_size=2, tensors=(TENSOR,), data_ranks=(0, 1)))
        for step in (0, 1):
            own = rank if differ and step else 0
            record = StepRecord(
                step=step,
                rank=rank,
                began=() if step else (1,),
                ended=(5 + own,),
                gradients=(7 + own,),
                projections=((1.0 + own,) * 4,),
                norms=(1.0,),
                squares=(1.0,),
                before=(1.0,),
                num_backward=counts[rank] if step else 2,
                calls=(
                    *[LoopCall(step=step, name="backward", site="train.py:3")] * 2,
                    LoopCall(step=step, name="optimizer step", site="train.py:5"),
                ),
            )
            outbox.put(record)


@pytest.mark.parametrize(
    ("counts", "differ", "checks"),
    [
        ((4, 6), True, [ScriptCheck.CALLS]),
        ((4, 4), True, [GuardCheck.REPLICAS]),
        ((4, 5), True, [GuardCheck.REPLICAS]),
        ((4, 6), False, []),
    ],
)
def test_more_backward_passes_are_the_cause_of_a_drift(
    tmp_path: Path, counts: tuple[int, int], differ: bool, checks: list[str]
) -> None:
    leave(tmp_path, counts, differ=differ)
    found = Judge(tmp_path).look(is_over=True)
    assert [each.check for each in found] == checks
    if checks == [ScriptCheck.CALLS]:
        (facts,) = (each.facts for each in found)
        assert isinstance(facts, CallFacts)
        assert (facts.rule, facts.expected, facts.actual) == (CallRule.SKIPPED_STEP, 4, 6)
        assert (found[0].rank, facts.site) == (1, "train.py:5")


def test_findings_in_later_steps_follow_from_a_skipped_step(tmp_path: Path) -> None:
    leave(tmp_path, (4, 6), differ=True)
    for rank in (0, 1):
        record = StepRecord(step=2, rank=rank, findings=(make_consequence(2),) if rank else ())
        RankOutbox(tmp_path, rank).put(record)
    both = Judge(tmp_path)
    assert [each.tensor for each in both.look(is_over=True)] == [CallRule.SKIPPED_STEP]
    assert both.unjudged
