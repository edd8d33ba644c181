"""A selection of the clean matrix: nothing is wrong, and nothing is said to be."""

from pathlib import Path

from moeverify.suite import clean
from moeverify.suite.options import RunOptions


def test_clean_runs_raise_no_alarm(tmp_path, monkeypatch):
    chosen = [run for run in clean.clean_cases(1) if run[1].layout.world_size == 2][::12]
    monkeypatch.setattr(clean, "clean_cases", lambda num_seeds: iter(chosen))
    options = RunOptions(device="cpu", cache_folder=tmp_path, golden_folder=Path("no", "goldens"))
    rows = clean.run_clean(1, options, lambda event: None)
    assert len(rows) == len(chosen) > 8
    assert [(row.name, row.detail) for row in rows if row.verdict != "pass"] == []
    assert all(row.worst < 1 for row in rows)


def test_the_matrix_has_at_least_300_runs():
    assert len(list(clean.clean_cases(2))) >= 300
