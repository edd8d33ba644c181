"""Commands in a GitHub workflow, and the action of this repository."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]


@pytest.fixture
def summary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    return tmp_path / "summary.md"


def test_a_workflow_gets_annotations_and_a_summary_by_itself(invoke: Any, keep: Any, summary: Path) -> None:
    summary.write_text("of an earlier command\n")
    result = invoke("report", keep("a", "mismatch", 1.0))
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith(
        "::error file=cases/fsdp2-2.yaml,title=moeverify%3A fsdp2-2"
    )
    assert summary.read_text().startswith("of an earlier command\n## moeverify: mismatch")


def test_it_can_be_turned_off_and_on(
    invoke: Any, keep: Any, summary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keep("a", "mismatch", 1.0)
    assert "::error" not in invoke("report", kept, "--no-github").stdout
    assert not summary.exists()
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name)
    assert "::error" not in invoke("report", kept).stdout
    assert "::error" in invoke("report", kept, "--github").stdout
    assert not summary.exists()


def test_a_summary_that_cannot_be_written_costs_nothing_else(
    invoke: Any, keep: Any, summary: Path, tmp_path: Path
) -> None:
    summary.mkdir()
    result = invoke("report", keep("a", "mismatch", 1.0), "--csv", tmp_path / "a.csv")
    assert result.exit_code == 2
    assert f"error: the job summary {summary} was not written" in result.stderr
    assert "::error" in result.stdout
    assert (tmp_path / "a.csv").exists()


def test_bad_cases_are_annotated_where_they_are_bad(invoke: Any, summary: Path, case_file: Path) -> None:
    case_file.write_text(case_file.read_text().replace("dp_shard: 2", "dp_shad: 2"))
    result = invoke("check", case_file)
    assert result.exit_code == 2
    (line,) = [line for line in result.output.splitlines() if line.startswith("::error")]
    assert line.startswith("::error file=fsdp2-2.yaml,line=12,title=moeverify%3A bad case::layout.dp_shad: ")


@pytest.fixture(scope="module")
def action() -> Any:
    return YAML(typ="safe").load(ROOT / "action.yml")


def test_the_action_uses_inputs_and_options_that_there_are(invoke: Any, action: Any) -> None:
    text = (ROOT / "action.yml").read_text()
    assert set(re.findall(r"inputs\.(\w+)", text)) == set(action["inputs"])
    (run,) = [step for step in action["runs"]["steps"] if step.get("id") == "run"]
    options = re.findall(r"(--[a-z]+)", run["run"])
    assert options
    known = invoke("run", "--help").stdout
    assert all(option in known for option in options)
    page = (ROOT / "docs" / "ci.md").read_text()
    table = page.partition("| Input | Default | Meaning |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert rows == list(action["inputs"])


def test_the_pipelines_of_the_page_use_options_that_there_are_and_keep_files_that_they_write(
    invoke: Any,
) -> None:
    page = (ROOT / "docs" / "ci.md").read_text()
    blocks = [YAML(typ="safe").load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    gitlab = next(block["verify"] for block in blocks if "verify" in block)
    (buildkite,) = next(block["steps"] for block in blocks if "steps" in block)
    known = invoke("run", "--help").stdout
    kept = (
        gitlab["artifacts"]["paths"] + [gitlab["artifacts"]["reports"]["junit"]],
        buildkite["artifact_paths"],
    )
    for commands, paths in zip((gitlab["script"], buildkite["commands"]), kept, strict=True):
        (command,) = [line for line in commands if "moeverify run" in line]
        options = dict(re.findall(r"(--[a-z]+) (\S+)", command))
        assert all(option in known for option in options)
        written = {options["--junit"], options["--html"], f"{options['--out']}/result.json"}
        assert paths
        assert set(paths) <= {*written, f"{options['--out']}/**/*"}


@pytest.mark.parametrize(
    ("code", "verdict"), [(0, "verdict=pass\n"), (1, "verdict=mismatch\n"), (2, ""), (3, "verdict=error\n")]
)
def test_the_script_of_the_action_passes_words_and_verdicts_on(
    action: Any, tmp_path: Path, code: int, verdict: str
) -> None:
    (run,) = [step for step in action["runs"]["steps"] if step.get("id") == "run"]
    command = tmp_path / "moeverify"  # a stub that records its arguments: only the script is tested
    command.write_text(f'#!/bin/sh\nfor word; do echo "$word"; done > {tmp_path}/words\nexit {code}\n')
    command.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CASES": "cases 'more cases'",
        "OPTIONS": "-k 'ep and not tp'",
        "GITHUB_OUTPUT": str(tmp_path / "output"),
    }
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", run["run"]]  # as GitHub starts it
    done = subprocess.run(shell, env=variables, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == code
    assert (tmp_path / "output").read_text() == verdict
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:6] == ["run", "cases", "more cases", "-k", "ep and not tp", "--github"]
