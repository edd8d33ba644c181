"""`moeverify schema` prints the source of the reference page, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moeverify", "schema", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_schema_is_json_whatever_the_width_of_the_terminal() -> None:
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    schema = json.loads(done.stdout)
    assert schema["required"] == ["recipe"]
    assert set(schema["properties"]) >= {"name", "recipe", "layout", "checks"}
    assert all(len(line) < 4000 for line in done.stdout.splitlines())
    assert max(map(len, done.stdout.splitlines())) > 120  # no line was wrapped


def test_the_page_is_the_committed_one() -> None:
    done = run("--page")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (ROOT / "docs" / "reference" / "case.md").read_text()


def test_results_have_no_page() -> None:
    done = run("--page", "--results")
    assert (done.returncode, done.stdout) == (2, "")
    assert "only the fields of a case have a page" in done.stderr
    assert json.loads(run("--results").stdout)["title"] == "Results of moeverify"
