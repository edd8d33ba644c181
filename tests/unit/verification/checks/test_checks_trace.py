"""Collectives in which the ranks of a group differ, judged from each rank's records."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moeverify.report.words.check import word_check
from moeverify.report.words.run import word_finding
from moeverify.results.facts import CollectiveFacts, Issue, NumCollectives
from moeverify.results.finding import Finding
from moeverify.verification.checks.base import ShownTensors
from moeverify.verification.checks.trace import Pages, Trace
from moeverify.verification.collectives.ledger import Ledger, Stream

TP = Stream("5", (0, 1), "tp")
SITE = "a.py:1 in f"


def issue(*signatures: str, stream: Stream = TP, room: int = 100, site: str = SITE) -> Ledger:
    ledger = Ledger(room)
    for signature in signatures:
        ledger.note(stream, signature, site)
    return ledger


def report(ledgers: tuple[Ledger, ...], stream: Stream, *, are_equal: bool) -> list[Pages]:
    unequal = [] if are_equal else [stream]
    return [Pages(ledger.pages(), {each: ledger.entries(each) for each in unequal}) for ledger in ledgers]


@pytest.fixture
def shown(run_ranks: Callable) -> ShownTensors:
    shown: ShownTensors = run_ranks({0: {"tp": 0}, 1: {"tp": 1}}).shown()
    return shown


@pytest.fixture
def find(shown: ShownTensors) -> Callable[..., Finding]:
    """Return a function that returns the finding of a group whose ranks have issued different collectives."""

    def do(*ledgers: Ledger, stream: Stream = TP) -> Finding:
        outcome = Trace().judge(shown, report(ledgers, stream, are_equal=False))
        assert outcome is not None
        (finding,) = outcome.findings
        return word_finding(finding)

    return do


def test_groups_that_agree_are_counted(shown: ShownTensors) -> None:
    outcome = Trace().judge(shown, report((issue("a", "b"), issue("a", "b")), TP, are_equal=True))
    assert outcome is not None
    assert (outcome.result.verdict, outcome.result.tensors, outcome.findings) == ("pass", 1, ())
    assert outcome.result.facts == NumCollectives(most=2)
    assert word_check(outcome.result).note == "up to 2 collectives of a rank"
    assert Trace().judge(shown, []) is None


def test_the_first_difference_has_its_places(find: Callable[..., Finding]) -> None:
    finding = find(issue("a", "b", "c"), issue("a", "c", site="b.py:2 in g"))
    assert finding.facts == CollectiveFacts(
        axis="tp",
        ranks=(0, 1),
        number=2,
        issues=(
            Issue(ranks=(0,), signature="b", site=SITE),
            Issue(ranks=(1,), signature="c", site="b.py:2 in g"),
        ),
        counts={0: 3, 1: 2},
        group="5",
    )
    assert (finding.tensor, finding.code) == ("tp group (0,1)", "collectives")
    assert finding.where == "axis tp"
    assert finding.cause == "the ranks issue different collectives, first as collective #2 of tp group (0,1)"
    lines = ("rank 0: b, called at a.py:1 in f", "rank 1: c, called at b.py:2 in g")
    assert finding.evidence == (*lines, "issued in all: rank 0 3, rank 1 2")
    assert finding.place is not None
    assert (finding.place.axes, finding.place.collectives) == (("tp",), lines)


def test_a_rank_that_ends_early_issued_no_further_one(find: Callable[..., Finding]) -> None:
    finding = find(issue("a"), issue("a", "b"))
    assert finding.evidence[:2] == ("rank 0: no further one", "rank 1: b, called at a.py:1 in f")


def test_what_is_no_longer_known_is_said_to_be_so(find: Callable[..., Finding]) -> None:
    finding = find(issue("a", "a", "b", room=2), issue("a", "a", "c", room=2))
    assert finding.evidence[0] == (
        "they agree in the first 2, and no more is kept; rank 0 issued 3, rank 1 issued 3"
    )


def test_messages_have_their_two_ranks(find: Callable[..., Finding]) -> None:
    stream = Stream("5", (1, 0), "pp", is_message=True)
    finding = find(issue("a", stream=stream), issue("b", stream=stream), stream=stream)
    assert finding.tensor == "messages from 1 to 0 over pp"
