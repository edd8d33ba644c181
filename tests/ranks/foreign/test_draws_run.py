"""The runner of planted bugs: one command for two plants, a result for each, and their scores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
DRAWS = ROOT / "benchmarks" / "draws"


def test_plants_are_run_and_scored(tmp_path: Path) -> None:
    only = ["p39", "p39g"]
    command = [sys.executable, DRAWS / "run.py", "--only", *only, "--out", tmp_path, "--workers", "1"]
    command += ["--explain-seconds", "0"]  # the search is no matter of the runner
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 to run in 1 commands" in done.stdout
    for name in only:
        record = json.loads((tmp_path / "results" / f"{name}--float64.json").read_text())
        assert record["verdict"] == "mismatch"
        assert all(not finding["follows"] for finding in record["case"]["findings"])
        assert f"{name}  MISMATCH" in (tmp_path / "text" / f"{name}--float64.txt").read_text()
        assert (tmp_path / "json" / f"{name}--float64.json.gz").is_file()
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "0 of 2 to run" in again.stdout

    rows = tmp_path / "rows.json"
    subprocess.run(
        [sys.executable, DRAWS / "score.py", tmp_path, "--json", rows], check=True, capture_output=True
    )
    assert [(row["id"], row["detected"]) for row in json.loads(rows.read_text())] == [
        ("p39", True),
        ("p39g", True),
    ]
