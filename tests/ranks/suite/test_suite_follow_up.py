"""`--follow-up` on real ranks: two axes of one size explain a fault, and a second layout decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeverify.faults.catalogue import load_faults
from moeverify.results.factor import Product
from moeverify.verification.controller.follow_up import follow_up
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases

pytestmark = pytest.mark.timeout(900)


def test_the_second_layout_names_the_axis(known_goldens: Path) -> None:
    # Gradients of experts are multiplied by the number of all ranks.
    fault = load_faults()["A01"]
    options = RunOptions(
        device="cpu",
        cache_folder=known_goldens,
        golden_folder=Path("no", "goldens"),
        fault=fault.target,
        explain_seconds=0.0,  # a formula names the axes
    )
    result = run_cases([fault.case], options, lambda event: None)
    (before,) = [finding for finding in result.cases[0].findings if not finding.follows]
    assert before.place.axes == ("ep", "dp_replicate")
    assert before.explanation.candidates == tuple(Product(times=(axis,)) for axis in before.place.axes)
    assert before.follow_up.layout == {"dp_replicate": 4}
    told = follow_up([fault.case], result, options, lambda event: None)
    (after,) = [finding for finding in told.cases[0].findings if not finding.follows]
    assert after.place.axes == ("dp_replicate",)
    assert after.explanation.candidates == (Product(times=("dp_replicate",)),)
    assert after.explanation.factors[0].value == pytest.approx(2.0)
    assert (after.follow_up.outcome, after.follow_up.left) == ("narrowed", after.explanation.candidates)
    assert after.follow_up.seen.factors[0].value == pytest.approx(4.0)
    assert told.launches == result.launches + 1
