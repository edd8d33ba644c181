"""The tutorial's layouts, run with a small model instead of the full-size one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from forked.python import ForkedPython

from moeverify.cases.validation.load import load_cases

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "examples" / "tutorial"
NAMES = ["tutorial-ddp", "tutorial-fsdp2", "tutorial-tp", "tutorial-tp-loss-parallel"]
# Two ranks do not divide this vocabulary evenly, as with 50257.
SMALL = ("--set", "recipe.model.preset=tiny-gpt", "--set", "recipe.model.vocab_size=131")


def run(command: Sequence[str], *words: str | Path) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name != "CI"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=variables,
        check=False,
    )


def test_the_cases_have_the_size_of_the_tutorial() -> None:
    cases = load_cases([TUTORIAL])
    assert [case.name for case in cases] == NAMES
    for case in cases:
        model = case.recipe.model.reference
        assert model is not None
        assert (model.vocab_size, model.hidden, model.num_layers) == (50257, 1024, 4)


def test_mesh_groups_and_losses_stand_side_by_side(tmp_path: Path, python: ForkedPython) -> None:
    kept = tmp_path / "tutorial.json"
    options = ("--device", "cpu", "--cache", tmp_path, "--json", kept)
    done = run(python.command(), "-m", "moeverify", "run", TUTORIAL, *SMALL, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = run([sys.executable], TUTORIAL / "side_by_side.py", kept)
    assert shown.returncode == 0, shown.stderr
    places, losses = (table.splitlines() for table in shown.stdout.split("\n\n"))
    rows = [line.split() for line in places if line.startswith("tutorial-")]
    axes = ("dp_replicate", "dp_shard", "tp", "tp")
    assert rows == [
        [name, axis, "2", f"{axis}:", "0,1", "pass"] for name, axis in zip(NAMES, axes, strict=True)
    ]
    assert losses[0].split() == ["step", "one", "device", *NAMES]
    content = {case["name"]: case["losses"] for case in json.loads(kept.read_text())["cases"]}
    for step, line in enumerate(losses[2:4]):
        values = [float(value) for value in line.split()[1:]]
        expected = [content[NAMES[0]][step][0], *(content[name][step][1] for name in NAMES)]
        assert values == pytest.approx(expected, abs=1e-7)
