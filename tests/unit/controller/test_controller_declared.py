from __future__ import annotations

from moeverify.case.schema import Checks
from moeverify.controller.declared import settle
from moeverify.results.finding import CheckResult


def make_checks(**verdicts: str) -> list[CheckResult]:
    return [CheckResult(name=name, verdict=verdict, tensors=1) for name, verdict in verdicts.items()]


def test_without_a_declaration_any_difference_is_one() -> None:
    assert settle(Checks(), make_checks(loss="pass", gradient="pass")) == ("pass", ())
    assert settle(Checks(), make_checks(loss="pass", gradient="mismatch")) == ("mismatch", ())


def test_exactly_what_is_declared_must_differ() -> None:
    wanted = Checks(differs=("loss", "gradient"), because="means another thing")
    verdict, notes = settle(wanted, make_checks(loss="mismatch", gradient="mismatch", update="pass"))
    assert verdict == "pass"
    assert "as declared: means another thing" in notes[0]
    verdict, notes = settle(wanted, make_checks(loss="mismatch", gradient="pass", update="pass"))
    assert verdict == "mismatch"
    assert "gradient, and does not" in notes[0]
    verdict, notes = settle(wanted, make_checks(loss="mismatch", gradient="mismatch", update="mismatch"))
    assert verdict == "mismatch"
    assert "and in more" in notes[0]
