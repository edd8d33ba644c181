"""A whole gradient that is summed over ranks with parts of another one, in each of two layers."""

from __future__ import annotations

from pathlib import Path

from moeverify.cases.validation.load import load_cases
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases

PROGRAMS = Path(__file__).parent / "programs"
PROGRAM = PROGRAMS / "planted_gates.py"


def test_a_whole_value_beside_parts_is_named_though_one_device_adds_it_to_other_values(
    tmp_path: Path,
) -> None:
    for path in (PROGRAM, PROGRAMS / "planted_ffn.py"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "gates.yaml").write_text(
        "recipe:\n  name: gates\n  model: {factory: 'planted_gates:Model', vocab_size: 32}\n"
        "  data: {batch: 4, seq_len: 8}\n  steps: 1\n  precision: float64\n"
        "layout: {tp: 2, parallelize: 'planted_gates:parallelize'}\nchecks: {repeat: never}\n"
    )
    options = RunOptions(
        device="cpu",
        golden_folder=tmp_path / "golden",
        cache_folder=tmp_path / "cache",
        folder=tmp_path / "kept",
    )
    result = run_cases(load_cases([tmp_path / "gates.yaml"]), options, lambda event: None)
    assert result is not None
    culprit = result.cases[0].findings[0].culprit
    assert culprit is not None
    assert (culprit.mechanism, culprit.proved, culprit.axes) == ("share", True, ("tp",))
    assert culprit.here.line is not None
    line = PROGRAM.read_text().splitlines()[culprit.here.line.line - 1]
    assert "inside" in line
