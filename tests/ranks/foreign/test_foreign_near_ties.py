"""Experts whose scores are nearly equal: rounding changes no choice, and a wrong choice is seen."""

from __future__ import annotations

from pathlib import Path

from moeverify.cases.validation.load import load_cases
from moeverify.results.facts import ReplayedModules
from moeverify.results.finding import find_undecided
from moeverify.verification.controller.escalation import escalate
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases


def test_choices_near_a_tie_are_those_of_one_device(tmp_path: Path) -> None:
    program = Path(__file__).parent / "programs" / "tied_experts.py"
    (tmp_path / program.name).write_text(program.read_text())
    for way in ("right", "shifted"):
        (tmp_path / f"{way}.yaml").write_text(
            "recipe:\n  name: tied\n  model: {factory: 'tied_experts:Model', vocab_size: 32}\n"
            "  data: {batch: 8, seq_len: 8}\n  precision: bfloat16\n  optimizer: {name: sgd, lr: 1.0}\n"
            f"layout: {{dp_shard: 2, parallelize: 'tied_experts:{way}'}}\n"
        )
    cases = load_cases([tmp_path])
    options = RunOptions(device="cpu", golden_folder=tmp_path / "golden", cache_folder=tmp_path / "cache")
    alone = run_cases(cases, options, lambda event: None)
    assert alone is not None
    for case in alone.cases:
        # A shift of a choice is not seen in the rounding of bfloat16.
        assert (case.verdict, case.findings, find_undecided(case.checks)) == ("pass", (), [])
        facts = [each.facts for each in case.checks if isinstance(each.facts, ReplayedModules)]
        assert facts[0].num_near_ties >= facts[0].num_held > 0
    told = escalate(cases, alone, options, lambda event: None)
    right, shifted = told.cases
    assert (right.verdict, right.findings) == ("pass", ())
    assert "in float32 it passes, too" in right.notes
    assert shifted.verdict == "mismatch"
    assert shifted.lead is not None
    assert [wider.outcome for wider in shifted.lead.wider] == ["found"]
