"""Criteria for a finding at the right place with the right cause: based on data, for any wording."""

from __future__ import annotations

from typing import Any

import pytest

from moeverify.faults.catalogue import load_faults
from moeverify.faults.catalogue.gradient_norm import count_on_each_rank
from moeverify.faults.fault import Expected
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.culprit import CodeLine, Culprit, Operation, Origin
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.finding import Finding
from moeverify.results.operation import Altered
from moeverify.results.part import Part, Tokens
from moeverify.results.place import Place, Stage
from moeverify.results.run import CaseResult
from moeverify.verification.controller.fault_benchmark import score


def find(quantity: Quantity = Quantity.GRADIENT, module: str = "", losses: Any = (), **place: Any) -> Finding:
    subject = Subject(quantity=quantity, module=module, tensors=losses or ("layers.1.moe.experts.up",))
    return Finding(
        check="gradient",
        tensor="layers.1.moe.experts.up",
        step=0,
        rank=0,
        error=1.0,
        bound=0.0,
        code=Cause.SCALE.value,
        explanation=Explanation(cause=Cause.SCALE, subject=subject, operation=Altered()),
        place=Place(**place),
    )


OF_MICRO_BATCH = Part(term="lm", tokens=Tokens(data_rank=1, micro_batch=0))


@pytest.mark.parametrize(
    ("place", "finding", "matches"),
    [
        (At(), find(), True),
        (At(name="*.moe.experts*"), find(), True),
        (At(name="*.moe.router*"), find(), False),
        (At(name="*.moe.router*"), find(module="layers.0.moe.router"), True),
        (At(axis="tp"), find(axes=("tp", "ep")), True),
        (At(axis="t"), find(axes=("tp",)), False),
        (At(name="*.moe.experts*", axis="tp"), find(axes=("ep",)), False),
        (At(term="balance"), find(parts=(Part(term="balance"),)), True),
        (At(term="balance"), find(parts=(Part(term="lm"),)), False),
        (At(term="balance"), find(Quantity.LOSS, losses=("balance", "z")), True),
        (At(term="balance"), find(losses=("balance",)), False),
        (At(stage=Stage.CLIP), find(stage=Stage.CLIP), True),
        (At(stage=Stage.CLIP), find(stage=Stage.GRADIENT_NORM), False),
        (At(share="micro_batch"), find(parts=(OF_MICRO_BATCH,)), True),
        (At(share="context_rank"), find(parts=(OF_MICRO_BATCH,)), False),
        (At(share="data_rank"), find(), False),
    ],
)
def test_a_place_matches_by_all_that_it_gives(place: At, finding: Finding, matches: bool) -> None:
    assert place.matches(finding) == matches


def test_a_finding_without_place_and_explanation_has_its_tensor() -> None:
    plain = find().model_copy(update={"explanation": None, "place": None})
    assert At(name="layers.1.*").matches(plain)
    assert not At(axis="tp").matches(plain)
    assert not At(stage=Stage.CLIP).matches(plain)


def test_any_of_the_places_and_causes_is_right() -> None:
    expected = Expected(where=(At(axis="cp"), At(name="*experts*")), causes=(Cause.NORM, Cause.SCALE))
    assert expected.locates(find())
    assert expected.names(find())
    assert not Expected(where=(At(axis="cp"),), causes=(Cause.NORM,)).locates(find())
    assert not Expected(where=(At(axis="cp"),), causes=(Cause.NORM,)).names(find())


def test_the_first_finding_that_follows_from_none_is_scored() -> None:
    fault = load_faults()["A01"]
    follower = find().model_copy(update={"follows": "x", "tensor": "embed"})
    fields: dict[str, Any] = {"name": "A01", "file": "", "verdict": "mismatch", "ranks": 2, "seconds": 1.0}
    row = score(fault, CaseResult(findings=(follower, find()), losses=((1.0, 1.1),), **fields))
    assert (row.detected, row.located, row.cause_named, row.loss_curve) == (True, True, True, True)
    assert row.finding == find()
    nothing = score(fault, CaseResult(**{**fields, "verdict": "pass"}))
    assert (nothing.detected, nothing.located, nothing.cause_named, nothing.finding) == (
        False,
        False,
        False,
        None,
    )


def test_a_line_of_a_fault_is_the_operation_or_a_line_to_look_at_in_its_own_code() -> None:
    fault, before = load_faults()["N03"], load_faults()["N02"]
    own, other = (
        CodeLine(file="moeverify/faults/catalogue/optimizer.py", line=each.inject.__code__.co_firstlineno + 1)
        for each in (fault, before)
    )

    def shows(line: CodeLine, *origins: CodeLine) -> bool:
        here = Operation(operator="mul", line=line, callers=(own,))
        lines = tuple(Origin(kind="value", line=each) for each in origins)
        culprit = Culprit(mechanism="place", proved=False, here=here, origins=lines)
        return fault.shows_line(find().model_copy(update={"culprit": culprit}))

    assert (shows(own), shows(other), shows(other, own)) == (True, False, True)
    assert not fault.shows_line(find())


def test_a_helper_that_faults_share_is_own_code_of_each() -> None:
    line = count_on_each_rank.__code__.co_firstlineno + 1
    here = Operation(
        operator="mul", line=CodeLine(file="moeverify/faults/catalogue/gradient_norm.py", line=line)
    )
    finding = find().model_copy(update={"culprit": Culprit(mechanism="place", proved=False, here=here)})
    assert [load_faults()[number].shows_line(finding) for number in ("H02", "H12", "H06")] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("number", load_faults())
def test_every_fault_has_a_place_that_says_something(number: str) -> None:
    expected = load_faults()[number].expected
    assert expected.where
    assert expected.causes
    assert At() not in expected.where
