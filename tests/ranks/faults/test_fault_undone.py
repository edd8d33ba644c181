"""Ranks run many cases: a fault, however it is written, applies to its own case, and the next is clean."""

import os
from pathlib import Path

import pytest

from moeverify.cases.schema import Case
from moeverify.faults.setting import make_case
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases

# Two ranks; the result is the error factor of expert gradients, 1.0 when they are right.
CASES = {
    "wrapped": ("wrap", 2.0),
    "clean after a wrapper": (None, 1.0),
    "assigned": ("assign", 2.0),
    "assigned again": ("assign", 2.0),
    "clean after an assignment": (None, 1.0),
    "failed": ("fail_half_way", None),
    "clean after an error": (None, 1.0),
}


@pytest.fixture(scope="module")
def results(known_goldens):
    patch = pytest.MonkeyPatch()
    patch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    )
    small = {"model": {"num_layers": 2}, "recipe": {"steps": 1}}
    base = make_case("undone", **small, dp_replicate=2, data_parallel="ddp", ep=2)
    cases: list[Case] = [base.model_copy(update={"name": name}) for name in CASES]
    options = RunOptions(
        device="cpu",
        cache_folder=known_goldens,
        golden_folder=Path("no", "goldens"),
        require_goldens=False,
        explain_seconds=0.0,
        case_faults={name: f"fault_programs:{fault}" for name, (fault, _) in CASES.items() if fault},
    )
    try:
        return {case.name: case for case in run_cases(cases, options, lambda event: None).cases}
    finally:
        patch.undo()


@pytest.mark.parametrize("name", [name for name, (_, factor) in CASES.items() if factor is not None])
def test_expert_gradients_are_off_by_the_fault_of_their_own_case_alone(results, name):
    factor, result = CASES[name][1], results[name]
    if factor == 1.0:
        assert (result.verdict, list(result.findings)) == ("pass", [])
        return
    first = next(finding for finding in result.findings if not finding.follows)
    assert first.code == "scale", first
    assert "moe.experts" in first.tensor
    assert first.scale == pytest.approx(factor)


def test_an_error_in_a_fault_is_told_as_one(results):
    failed = results["failed"]
    assert failed.verdict == "error"
    assert "planted after the first wrapper" in failed.reason
