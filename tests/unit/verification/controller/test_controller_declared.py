from __future__ import annotations

from functools import partial

import pytest

from moeverify.cases.schema import Checks, Precision
from moeverify.report.words.note import describe_declared
from moeverify.results.finding import CheckResult
from moeverify.results.run import Declared
from moeverify.verification.controller.run import apply_declared_differences


def make_checks(**verdicts: str) -> list[CheckResult]:
    return [CheckResult(name=name, verdict=verdict, tensors=1) for name, verdict in verdicts.items()]


def decide_declared(differs: tuple[str, ...], precision: Precision, **verdicts: str) -> str:
    """Return the verdict of a case that declares checks to differ, in a precision."""
    wanted = Checks(differs=differs, because="means another thing")
    return apply_declared_differences(wanted, make_checks(**verdicts), precision)[0]


def test_without_a_declaration_any_difference_is_one() -> None:
    assert apply_declared_differences(Checks(), make_checks(loss="pass", gradient="pass")) == ("pass", None)
    assert apply_declared_differences(Checks(), make_checks(loss="pass", gradient="mismatch")) == (
        "mismatch",
        None,
    )


@pytest.mark.parametrize(
    ("found", "verdict", "equal", "has_more", "words"),
    [
        (
            ("loss", "gradient"),
            "pass",
            (),
            False,
            "differs in loss, gradient, as declared: means another thing",
        ),
        (("loss",), "mismatch", ("gradient",), False, "declared to differ in gradient, and does not"),
        (
            ("loss", "gradient", "update"),
            "mismatch",
            (),
            True,
            "differs as declared in loss, gradient, and in more",
        ),
    ],
)
def test_exactly_what_is_declared_must_differ(
    found: tuple[str, ...], verdict: str, equal: tuple[str, ...], has_more: bool, words: str
) -> None:
    wanted = Checks(differs=("loss", "gradient"), because="means another thing")
    names = ("loss", "gradient", "update")
    checks = make_checks(**{name: "mismatch" if name in found else "pass" for name in names})
    decided, declared = apply_declared_differences(wanted, checks)
    assert decided == verdict
    assert declared == Declared(
        names=("loss", "gradient"),
        differ=tuple(name for name in found if name != "update"),
        equal=equal,
        has_more=has_more,
        because="means another thing",
    )
    assert describe_declared(declared) == words


def test_below_float64_rounding_may_hide_a_declared_difference_but_not_all_of_them() -> None:
    decide = partial(decide_declared, ("loss", "gradient"))
    assert decide("bfloat16", loss="mismatch", gradient="pass") == "pass"
    assert decide("bfloat16", loss="pass", gradient="pass") == "mismatch"
    assert decide("bfloat16", loss="mismatch", update="mismatch") == "mismatch"
    assert decide("float64", loss="mismatch", gradient="pass") == "mismatch"
    assert decide("float64", loss="mismatch", gradient="mismatch") == "pass"


def test_one_declaration_serves_precisions_that_make_other_checks() -> None:
    decide = partial(decide_declared, ("loss", "modules"))
    assert decide("float64", loss="mismatch", gradient="pass") == "pass"
    assert decide("bfloat16", loss="pass", modules="mismatch") == "pass"
    assert decide("float64", loss="mismatch", modules="pass") == "mismatch"
    assert decide("float64", loss="pass") == "mismatch"
    assert decide("float64", gradient="pass") == "mismatch"
