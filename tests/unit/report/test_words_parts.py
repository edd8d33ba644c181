"""Sentences of the guard and of `compare` about copies, clips, data and unequal starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moeverify.parallel.regions.region import Region
from moeverify.report.words.guard import describe_facts
from moeverify.report.words.run import word_finding
from moeverify.results.facts import Facts
from moeverify.results.finding import Finding
from moeverify.results.guard import DriftCause, DriftFacts, TokenFacts
from moeverify.results.observation import AmbiguousCount
from moeverify.results.place import UserCall
from moeverify.results.script import CallFacts, CallRule, CopyFacts, MemberFacts
from moeverify.scripts.compare.compare import _name_unequal_start
from moeverify.scripts.compare.places import Placed, Places


def make_finding(facts: Facts | None, *sites: str, **changes: Any) -> Finding:
    found = {"check": "x", "tensor": "up", "step": 0, "rank": 1, "ranks": (0, 1), "error": 1.0, "bound": 0.0}
    lines = tuple(UserCall(name="backward", site=site) for site in sites)
    return Finding.model_validate({**found, "facts": facts, "sites": lines, **changes})


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (CopyFacts(kind="siblings", names=("b",), others=("a",)), "1 tensor of rank 1 began as copies"),
        (CopyFacts(kind="shards", names=("a", "b")), "the shards of 2 tensors began with the same values"),
        (
            CopyFacts(kind="sums", names=("a",), num_ranks=4, site="m.py:1"),
            "the sum is 4 times one rank's value",
        ),
        (TokenFacts(num_rows=4, num_shared=4, num_steps=4, shift=-2), "each 2 forward passes earlier"),
        (CallFacts(rule=CallRule.SCALED_CLIP, norm=1024.0), "multiplied by the loss scale 1024"),
        (CallFacts(rule=CallRule.EARLY_CLIP, actual=4, expected=1), "4 clips per optimizer step, in RUN_A 1"),
        (CallFacts(rule=CallRule.CLIP, actual=4, expected=1), "4 clips per optimizer step, in RUN_A 1"),
        (CallFacts(rule=CallRule.CLIP, actual=1), "clipped in one of the runs only"),
        (MemberFacts(which="replaced"), "built before the model was wrapped"),
        (MemberFacts(which="idle"), "its steps change nothing"),
        (CallFacts(rule=CallRule.NEW_OPTIMIZER), "begins without the moments of the one before"),
    ],
)
def test_a_fact_has_its_sentence(facts: Facts, said: str) -> None:
    assert said in describe_facts(facts, make_finding(facts)).cause


@pytest.mark.parametrize(
    ("cause", "said", "where"),
    [
        (
            DriftCause(kind="sequence", module="norm", counts=(4, 8)),
            "norm with its part of the sequence, 4 of 8 positions, and gradients are not reduced over the ranks",
            "norm",
        ),
        (
            DriftCause(kind="sequence", module="head", counts=(4, 8), is_ambiguous=True),
            "or a gather in front of it is missing",
            "head",
        ),
        (
            DriftCause(kind="local", module="up"),
            "same loss; the output of up is the first that differs",
            "up",
        ),
        (DriftCause(kind="backward", module="up"), "lacks a sum or a gather over the ranks", "backward pass"),
        (DriftCause(kind="forward"), "have the same rows and compute other losses", "forward pass"),
        (DriftCause(kind="forward", module="up"), "a sum over the ranks is missing there, or random", "up"),
        (DriftCause(kind="rows", ranks=(0, 1)), "but have different rows of the batch", "data"),
        (DriftCause(kind="overwrite", ranks=(0,)), "of rank 0 replace those of the other ranks", "weights"),
    ],
)
def test_a_cause_of_a_drift_has_its_sentence(cause: DriftCause, said: str, where: str) -> None:
    facts = DriftFacts(names=("up",), since="update", gradients="differ", distance=0.1, cause=cause)
    words = describe_facts(facts, make_finding(facts))
    assert said in words.cause
    assert words.where == where


def test_ranks_with_equal_gradients_are_listed() -> None:
    facts = DriftFacts(
        names=("up",), since="update", gradients="differ", distance=0.1, groups=((0, 1), (2, 3), (4,))
    )
    assert "are equal on ranks 0, 1 and on ranks 2, 3" in describe_facts(facts, make_finding(facts)).cause


def test_the_first_line_of_a_finding_is_its_place_and_all_are_evidence() -> None:
    worded = word_finding(make_finding(MemberFacts(which="idle"), "train.py:3", "train.py:9"))
    assert worded.where == "optimizer, train.py:3"
    assert "backward: train.py:3, backward: train.py:9" in worded.evidence


def test_the_command_that_separates_equal_counts_is_evidence() -> None:
    seen = AmbiguousCount(num_ranks=2, num_micro_batches=2, script="train.py --size 3")
    (line,) = word_finding(make_finding(None, observations=(seen,))).evidence
    assert "torchrun --nproc-per-node 2 train.py --size 3" in line


def test_replicas_of_which_one_began_otherwise_are_named() -> None:
    run: Any = SimpleNamespace(world_size=2)
    whole = Places({(rank, "up"): Placed("up", Region.whole((2, 2))) for rank in (0, 1)})
    one = make_finding(None, check="initial state", ranks=(1,))
    assert "seeded differently" in _name_unequal_start(one, whole, run).cause
    assert not _name_unequal_start(one, Places(), run).cause  # parts
    assert not _name_unequal_start(make_finding(None, check="initial state"), whole, run).cause
