"""Lines on measurements, tested hypotheses, results of another layout, and a rank's collectives."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from moeverify.report.words.cause import describe_evidence
from moeverify.report.words.expected import describe_expected
from moeverify.report.words.observation import describe_observation
from moeverify.report.words.run import (
    describe_follow_up,
    describe_issued,
    list_notes,
    name_candidates,
    word_case,
    word_finding,
)
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.collective import IssuedCollective
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Factor, Product
from moeverify.results.finding import Finding, FollowUp
from moeverify.results.observation import (
    AmbiguousCount,
    DiagnosisFailed,
    FirstDivergence,
    FitResult,
    HiddenByRounding,
    KeptElements,
    LargestValue,
    NoValues,
    Observation,
    OtherLosses,
    OtherPasses,
    RankValues,
    RelativeError,
    ReplicaSum,
    RightAlike,
    ScalarValues,
    TriedOrders,
    WrongElements,
)
from moeverify.results.operation import Scaled
from moeverify.results.part import WHOLE, Contribution, Part
from moeverify.results.place import Place, Stage
from moeverify.results.run import CaseResult


def weigh(**terms: float) -> tuple[Contribution, ...]:
    return tuple(
        Contribution(part=Part(term=term), factor=Factor(value=value)) for term, value in terms.items()
    )


LINES = [
    (
        OtherPasses(step=0, expected=(8,), actual=(2, 2, 2, 2)),
        "forward passes of step 0: 1 of 8 rows in RUN_A, 4 of 2 rows in RUN_B; record RUN_A again with passes of 2 "
        "rows each, and compare with that",
    ),
    (
        OtherLosses(step=0, expected=2.0, actual=2.5, differ=True, rank=1),
        "the loss of step 0 is 2 in RUN_A and 2.5 on rank 1; record both runs with --outputs to find the first "
        "module that differs",
    ),
    (
        OtherLosses(step=0, expected=2.0, actual=2.0, differ=False),
        "the loss of step 0 is 2 in RUN_A and 2 in RUN_B",
    ),
    (
        RightAlike(axis="tp", num_right=2, num_alike=3),
        "2 of the 3 gradients with the same placement on tp match",
    ),
    (
        FitResult(contributions=(Contribution(part=WHOLE, factor=Factor(value=2.0)),), residual=1.2e-15),
        "relative fit residual 1.2e-15",
    ),
    (
        FitResult(contributions=weigh(lm=1.0, balance=0.5, z=1.0), residual=1.2e-15),
        "coefficients lm 1, balance 0.5, z 1; relative fit residual 1.2e-15",
    ),
    (
        ReplicaSum(axis="tp", num_replicas=2, factor=1.0 + 1e-12),
        "the 2 replicas over tp sum to the expected value",
    ),
    (
        ReplicaSum(axis="tp", num_replicas=2, factor=2.0),
        "the 2 replicas over tp sum to 2x the expected value",
    ),
    (
        LargestValue(expected=0.5, actual=0.0, absent_on=(1, 2, 3)),
        "largest absolute value 0, expected 0.5; absent on ranks 1-3",
    ),
    (ScalarValues(name="z", expected=1.0, actual=2.5, rank=1), "z: expected 1, actual 2.5 on rank 1"),
    (RankValues(values=(1.0, 2.0)), "ranks disagree: 1, 2"),
    (RankValues(values=tuple(map(float, range(6)))), "ranks disagree: 0, 1, 2, 3, and 2 more"),
    (
        RelativeError(error=0.001, units={"bfloat16": 2.0**-8}),
        "relative error 0.001; units of rounding: bfloat16 0.0039",
    ),
    (
        FirstDivergence(
            direction="backward",
            module="layers.2.moe",
            end="input",
            error=0.125,
            ranks=(0, 1),
            num_right=7,
            worst_right=3e-16,
        ),
        "gradient of the input of layers.2.moe is off by 0.125 on ranks 0, 1; before it 7 readings match to 3e-16",
    ),
    (
        FirstDivergence(
            direction="forward",
            module="moe",
            error=0.5,
            ranks=(1,),
            num_wrong=21,
            num_tokens=96,
            num_right=7,
        ),
        "output of moe is off by 0.5 at 21 of 96 tokens on rank 1; before it 7 readings match to 0",
    ),
    (
        TriedOrders(num_tried=25, num_giving=1),
        "25 orders of the right values tried, 1 of them gives every value",
    ),
    (
        TriedOrders(num_tried=25, num_giving=2),
        "25 orders of the right values tried, 2 of them give every value",
    ),
    (
        KeptElements(num_kept=3, num_elements=12),
        "3 of 12 elements are wrong and as they were before the load",
    ),
    (WrongElements(num_wrong=3, num_elements=8), "3 of 8 elements differ"),
    (
        HiddenByRounding(precision="bfloat16"),
        "rounding of bfloat16 hides causes: --set recipe.precision=float64 names them",
    ),
    (
        AmbiguousCount(num_ranks=2, num_micro_batches=2, script="train.py"),
        "ranks and micro-batches are both 2: record RUN_B again with another number of micro-batches (`moeverify "
        "watch --steps 0 --out RUN_C -- torchrun --nproc-per-node 2 train.py` with the option of the script), and "
        "compare; a factor that stays comes from the ranks",
    ),
    (
        NoValues(),
        "no cause was searched for: the golden has sketches and no values; a smaller case with whole tensors, "
        "without --sketch, finds the cause",
    ),
    (
        DiagnosisFailed(error="ValueError", message="no", site="moeverify/explain/fitting/fit.py:57"),
        "the diagnosis failed, so causes may be missing; checks and findings are complete (ValueError at "
        "moeverify/explain/fitting/fit.py:57: no)",
    ),
    (
        DiagnosisFailed(message="rank 1 was killed by SIGKILL"),
        "the diagnosis failed, so causes may be missing; checks and findings are complete (rank 1 was killed by "
        "SIGKILL)",
    ),
]


@pytest.mark.parametrize(("seen", "line"), LINES)
def test_every_observation_is_one_line(seen: Observation, line: str) -> None:
    assert describe_observation(seen) == line


def test_every_observation_has_words() -> None:
    union, _ = get_args(Observation)
    assert {type(seen) for seen, _ in LINES} == set(get_args(union))


SEEN = Explanation(
    cause=Cause.SCALE,
    subject=Subject(quantity=Quantity.GRADIENT, tensors=("w",)),
    operation=Scaled(
        contributions=(Contribution(part=WHOLE, factor=Factor(value=4.0, equals=(Product(times=("ep",)),))),)
    ),
)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "layout {dp_shard: 8} separates ep and efsdp"),
        (
            {"outcome": "narrowed", "left": (Product(times=("ep",)),), "seen": SEEN},
            "ep: under {dp_shard: 8}, the gradient is 4x too large; 4 = ep",
        ),
        (
            {"outcome": "none-left", "seen": SEEN},
            "none of ep, efsdp: under {dp_shard: 8}, the gradient is 4x too large; 4 = ep",
        ),
        ({"outcome": "not-shown"}, "not decided: under {dp_shard: 8}, nothing differs"),
        (
            {"outcome": "not-run", "reason": "rank 1 raised"},
            "not decided: the layout {dp_shard: 8} did not run: rank 1 raised",
        ),
        ({"answer": "an older answer"}, "an older answer"),
    ],
)
def test_follow_ups(fields: dict[str, Any], words: str) -> None:
    candidates = tuple(Product(times=(name,)) for name in ("ep", "efsdp"))
    question = FollowUp(axes=("ep", "efsdp"), layout={"dp_shard": 8}, candidates=candidates, **fields)
    assert describe_follow_up(question) == words
    assert name_candidates(question) == "ep and efsdp"
    assert name_candidates(question.model_copy(update={"candidates": ()})) == "ep and efsdp"


def test_issued_collectives() -> None:
    reduce = IssuedCollective(
        direction="backward",
        op="reduce_scatter_tensor",
        axis="efsdp",
        group=(1, 3),
        dtype="float64",
        shapes=((8, 2),),
        times=2,
        site="loop.py:118 in step",
    )
    barrier = IssuedCollective(direction="forward", op="barrier", axis="tp", group=(0, 1))
    gathers = reduce.model_copy(update={"shapes": ((8,), (4,)), "times": 1, "site": ""})
    place = Place(module="layers.0.moe", issued=(reduce, barrier, gathers), issued_in="layers.0.moe")
    assert describe_issued(place) == (
        "backward: reduce_scatter_tensor over efsdp (1,3) on float64[8, 2], 2 times, called at loop.py:118 in step",
        "forward: barrier over tp (0,1)",
        "backward: reduce_scatter_tensor over efsdp (1,3) on float64 of several shapes",
    )
    outer = place.model_copy(update={"issued": (barrier,), "issued_in": "layers.0"})
    assert describe_issued(outer) == ("in layers.0, forward: barrier over tp (0,1)",)
    assert describe_issued(outer.model_copy(update={"issued_in": ""}))[0].startswith("in the model, ")
    assert describe_issued(Place(module="m", issued=())) == ("none in this module, nor in one around it",)
    assert describe_issued(Place(module="m", collectives=("as it was said",))) == ("as it was said",)


def find(**fields: Any) -> Finding:
    content = {"check": "gradient", "tensor": "w", "step": 0, "rank": 1, "error": 1.0, "bound": 0.0}
    return Finding.model_validate(content | fields)


def test_evidence_is_what_the_check_said_and_what_was_measured() -> None:
    seen = HiddenByRounding(precision="bfloat16")
    finding = find(evidence=("3 elements are not finite",), observations=(seen,))
    lines = describe_evidence(finding)
    assert lines == ("3 elements are not finite", describe_observation(seen))
    # A finding that was written to a file and read again repeats nothing.
    assert describe_evidence(word_finding(finding)) == lines


def test_a_diagnosis_that_failed_is_a_note_of_the_case() -> None:
    failed = DiagnosisFailed(message="rank 1 was killed by SIGKILL")
    case = CaseResult(
        name="a",
        file="",
        verdict="mismatch",
        ranks=2,
        seconds=1.0,
        notes=("a note",),
        findings=(find(observations=(failed,)),),
    )
    assert list_notes(case) == ("a note", describe_observation(failed))
    worded = word_case(case)
    assert worded.notes == list_notes(worded) == list_notes(case)
    assert worded.findings[0].evidence == ()


def test_words_are_filled_in_for_programs() -> None:
    issued = IssuedCollective(direction="forward", op="barrier", axis="tp", group=(0, 1))
    place = Place(module="m", issued=(issued,), issued_in="m")
    question = FollowUp(axes=("ep",), layout={"ep": 4}, outcome="not-shown")
    finding = find(explanation=SEEN, code="scale", place=place, follow_up=question)
    worded = word_finding(finding)
    assert worded.cause == "the gradient is 4x too large; 4 = ep"
    assert worded.where == "axis ep"
    assert worded.place.collectives == ("forward: barrier over tp (0,1)",)
    assert worded.follow_up.answer == "not decided: under {ep: 4}, nothing differs"
    assert word_finding(worded) == worded


def test_what_a_fault_should_be_found_as() -> None:
    places = (
        At(name="*.moe.experts*", axis="tp"),
        At(term="z"),
        At(stage=Stage.CLIP),
        At(share="micro_batch"),
        At(axis="micro-batches"),
        At(),
    )
    assert describe_expected(places, (Cause.SCALE, Cause.NORM)) == (
        "scale or norm at *.moe.experts*, axis tp or z loss or clip or the shares of micro-batches or "
        "number of micro-batches or any place"
    )
