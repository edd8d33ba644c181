"""Errors that bfloat16 hides are found in the same run: a case that passes is verified in float64 too."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from suite_faults import round_frequencies
from typer.testing import CliRunner

from moeverify.cases.validation.load import load_cases
from moeverify.cli import build_app
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.verification.controller.escalation import escalate, find_confirming
from moeverify.verification.controller.fault_benchmark import run_faults
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases

pytestmark = pytest.mark.timeout(900)
NARROW = make_case("narrow", model={"num_layers": 2}, recipe={"precision": "bfloat16"}, dp_shard=2)
# These tests are about verdicts of two precisions: no search for the first wrong operation.
OPTIONS = RunOptions(device="cpu", golden_folder=Path("no", "goldens"), explain_seconds=0.0)
# The same recipe.
FILE = """\
recipe:
  name: narrow
  model: {preset: stress, num_layers: 2}
  data: {batch: 8, seq_len: 16, min_valid: 0.4}
  optimizer: {name: sgd, lr: 0.5, momentum: 0.9, clip_norm: 0.2}
  precision: bfloat16
  steps: 2
layout: {dp_shard: 2}
checks: {repeat: never}
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the goldens of both precisions, which all tests compare with."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("fault", [None, "suite_faults:round_frequencies"])
def test_a_wrong_layout_that_bfloat16_hides_is_found_in_float64(cache: Path, fault: str | None) -> None:
    options = replace(OPTIONS, cache_folder=cache, fault=fault)
    result = run_cases([NARROW], options, lambda event: None)
    assert result is not None
    assert result.verdict == "pass"
    assert escalate([NARROW], result, options, lambda event: None) == result
    told = escalate([NARROW], result, options, lambda event: None, confirming=find_confirming([NARROW], []))
    (case,) = told.cases
    assert case.name == "narrow"
    if fault is None:
        assert (told.verdict, case.findings) == ("pass", ())
        assert "in float64 it passes, too" in case.notes
    else:
        assert (told.verdict, case.verdict) == ("mismatch", "mismatch")
        assert case.lead is not None
        assert case.lead.is_of_wider_run
        assert case.lead.place is not None
        assert case.lead.place.module == "layers.0.attention"


def test_the_benchmark_says_what_its_own_precision_hides(cache: Path) -> None:
    expected = Expected(where=(At(name="layers.*"),), causes=())
    fault = Fault(
        number="Z01",
        title="rounded",
        source="none",
        mechanism="",
        trigger="",
        case=NARROW,
        expected=expected,
        inject=round_frequencies,
    )
    options = replace(OPTIONS, cache_folder=cache)
    (own,) = run_faults([fault], options, lambda event: None)
    assert (own.detected, own.found_in) == (False, "")
    (row,) = run_faults([fault], options, lambda event: None, escalates=True)
    assert (row.detected, row.located, row.found_in) == (True, True, "float64")
    assert (row.loss_curve, row.loss_and_norm) == (own.loss_curve, own.loss_and_norm)


def test_what_is_kept_is_the_verdict_of_both_precisions(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    kept, case = tmp_path / "kept.jsonl", tmp_path / "narrow.yaml"
    case.write_text(FILE)
    assert load_cases([case])[0].recipe.fingerprint() == NARROW.recipe.fingerprint()
    words = ["run", case, "--keep", kept, "--cache", cache, "--fault", "suite_faults:round_frequencies"]
    words += ["--device", "cpu", "--no-require-goldens", "--explain-seconds", 0]
    for again in (False, True):
        told = CliRunner().invoke(build_app(), [str(word) for word in words])
        assert told.exit_code == 1, told.output
        assert ("1 of 1 cases are in" in told.output) == again
        assert "found in float64" in told.output
