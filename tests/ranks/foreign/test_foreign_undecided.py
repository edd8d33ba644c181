"""A user's model in bfloat16: its own bounds decide too little, and a run in float32 decides the case."""

from __future__ import annotations

from pathlib import Path

from foreign_cases import EXAMPLES

from moeverify.cases.validation.load import load_cases
from moeverify.results.finding import find_undecided
from moeverify.verification.controller.escalation import escalate
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases


def test_a_case_that_decides_too_little_passes_only_if_float32_decides_it(tmp_path: Path) -> None:
    words = ("recipe.precision=bfloat16", "checks.repeat=never")
    cases = load_cases([EXAMPLES / "my_moe" / "ep.yaml"], overrides=words)
    options = RunOptions(
        device="cpu", golden_folder=tmp_path / "golden", cache_folder=tmp_path / "cache", must_decide=True
    )
    alone = run_cases(cases, options, lambda event: None)
    assert alone is not None
    (case,) = alone.cases
    assert (alone.verdict, case.verdict, case.findings) == ("undecided", "undecided", ())
    # Replayed modules decide the gradients. Updates smaller than a rounding of their bfloat16 weights stay
    # undecided.
    assert {check.name for check in find_undecided(case.checks)} == {"update"}
    assert "may not have been seen" in case.reason
    told = escalate(cases, alone, options, lambda event: None)
    (case,) = told.cases
    assert (told.verdict, case.verdict, case.decided_in, case.reason) == ("pass", "pass", "float32", "")
