"""A selection of the fault benchmark: faults are detected, located and their causes named.

`make faults` runs all of them, with the search for the first wrong operation. Here it runs for one.
"""

from pathlib import Path

import pytest

from moeverify.faults.catalogue import load_faults
from moeverify.report.words.run import word_finding
from moeverify.verification.controller.fault_benchmark import run_faults
from moeverify.verification.controller.options import RunOptions

FAULTS = load_faults()
# One fault of every class; all on two ranks.
SELECTION = (
    "A01", "B05", "C07", "D05", "E01", "F01", "G02", "H03", "I02", "J07", "K01", "L07", "M05", "N02", "O11", "P04",
)  # fmt: skip

EXPLAINED = "I02"

# All faults run in the set-up, one after the other.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def rows(known_goldens):
    """Return the row of each fault; for `EXPLAINED` alone the first wrong operation was searched."""
    found = {}
    others = tuple(number for number in SELECTION if number != EXPLAINED)
    for numbers, seconds in ((others, 0.0), ((EXPLAINED,), 60.0)):
        options = RunOptions(
            device="cpu",
            cache_folder=known_goldens,
            golden_folder=Path("no", "goldens"),
            explain_seconds=seconds,
        )
        rows = run_faults([FAULTS[number] for number in numbers], options, lambda event: None)
        found |= {row.number: row for row in rows}
    return found


@pytest.mark.parametrize("number", SELECTION)
def test_the_fault_is_detected_located_and_named(rows, number):
    row = rows[number]
    assert row.detected, row.reason
    said = word_finding(row.finding).cause if row.finding is not None else ""
    assert row.located, said
    assert row.cause_named, said
    assert row.finding is None or (row.finding.culprit is not None) == (number == EXPLAINED)


def test_the_selection_has_every_class_and_every_fault_of_it_two_ranks():
    assert {number[0] for number in SELECTION} == set("ABCDEFGHIJKLMNOP")
    cases = [case for n in SELECTION for case in (FAULTS[n].case, FAULTS[n].saver) if case is not None]
    assert {case.layout.world_size for case in cases} == {2}


def test_a_loss_curve_is_blind_to_most_of_them(rows):
    assert sum(rows[number].loss_curve for number in SELECTION) < len(SELECTION) / 2


def test_every_fault_says_where_it_comes_from():
    faults = load_faults()
    assert len(faults) >= 100
    for fault in faults.values():
        assert fault.source
        assert fault.mechanism
        assert fault.trigger
