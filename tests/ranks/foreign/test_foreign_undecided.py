"""A user's model below float32: its own bounds decide too little, and a run in a wider precision decides."""

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


def test_a_wider_run_decides_unless_the_users_code_narrows_there_too(tmp_path: Path) -> None:
    program = Path(__file__).parent / "programs" / "mixed_models.py"
    (tmp_path / program.name).write_text(program.read_text())
    for way, wide in (("right", ""), ("autocast", ", in_float32: ['layers.*.norm', embed]")):
        (tmp_path / f"{way}.yaml").write_text(
            "recipe:\n  name: mixture\n  model: {factory: 'mixed_models:Mixture', vocab_size: 32}\n"
            "  data: {batch: 8, seq_len: 8, min_valid: 0.5}\n  precision: mixed\n"
            f"  optimizer: {{name: sgd, lr: 0.1}}\n"
            f"layout: {{dp_shard: 2, parallelize: 'mixed_models:{way}'{wide}}}\n"
        )
    cases = load_cases([tmp_path])
    options = RunOptions(device="cpu", golden_folder=tmp_path / "golden", cache_folder=tmp_path / "cache")
    alone = run_cases(cases, options, lambda event: None)
    assert alone is not None
    assert alone.verdict == "pass"
    undecided = tuple(case.model_copy(update={"verdict": "undecided"}) for case in alone.cases)
    told = escalate(cases, alone.model_copy(update={"cases": undecided}), options, lambda event: None)
    policy, fixed = sorted(told.cases, key=lambda case: case.name, reverse=True)
    assert (policy.verdict, policy.decided_in, policy.findings) == ("pass", "float32", ())
    assert (fixed.verdict, fixed.findings) == ("undecided", ())
    assert "its run in float32 decides nothing" in fixed.notes[-1]
