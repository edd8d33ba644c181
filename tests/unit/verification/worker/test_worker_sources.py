"""Explanations of initial values get the source of the right ones from the check."""

from __future__ import annotations

from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.facts import ComparedFacts
from moeverify.results.finding import Finding
from moeverify.results.operation import OwnValues
from moeverify.verification.worker.verify import name_source


def test_the_source_of_initial_values_is_that_of_the_check() -> None:
    explained = Explanation(
        cause=Cause.REPLICAS,
        subject=Subject(quantity=Quantity.INITIAL_VALUE, tensors=("w",)),
        operation=OwnValues(ranks=(1,)),
    )
    finding = Finding(
        check="initial state", tensor="w", step=-1, rank=0, error=1.0, bound=0.0, explanation=explained
    )
    assert name_source(finding) == finding
    loaded = finding.model_copy(update={"facts": ComparedFacts(source="weights"), "rivals": (explained,)})
    named = name_source(loaded)
    assert named.explanation is not None
    assert {each.operation.source for each in (named.explanation, *named.rivals)} == {"weights"}
