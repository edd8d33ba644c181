"""Outputs of modules under FSDP2 and tensor parallelism, with bfloat16, against one device.

In 16 bits the bounds are wide, and the residual stream dilutes a block's error: the outputs around the
block stay within their bounds.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from forked.python import ForkedPython

from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.run import CaseResult
from moeverify.scripts.compare.compare import compare_runs
from moeverify.scripts.record.read import RecordedRun

PROGRAMS = Path(__file__).parent / "programs"
MIXED = ",--dtype,mixed"
RIGHT = f"none{MIXED}"
BUGS = (RIGHT, f"swapped{MIXED}", f"unreduced{MIXED}", f"norm-twice{MIXED}")

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def record(python: ForkedPython, folder: Path, num_ranks: int, *bugs: str) -> None:
    program = str(PROGRAMS / "record_bugs.py")
    words = [*python.command(), program, "train_fsdp_tp.py", str(num_ranks), str(folder), *bugs]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, python: ForkedPython) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    record(python, folder / "one", 1, RIGHT)
    record(python, folder / "many", 4, *BUGS)
    return folder


def compare(runs: Path, bug: str) -> CaseResult:
    return compare_runs(RecordedRun.read(runs / "one" / RIGHT), RecordedRun.read(runs / "many" / bug))


def test_a_right_script_passes_with_its_outputs(runs: Path) -> None:
    result = compare(runs, RIGHT)
    assert result.verdict == "pass"
    assert next(check for check in result.checks if check.name == CheckName.ACTIVATIONS).tensors > 40


@pytest.mark.parametrize(
    ("bug", "module"),
    [
        (f"swapped{MIXED}", "blocks.1"),
        (f"unreduced{MIXED}", "blocks.1.down"),
    ],
)
def test_a_wrong_forward_pass_is_placed_at_its_module(runs: Path, bug: str, module: str) -> None:
    origin, *others = (finding for finding in compare(runs, bug).findings if not finding.follows)
    assert not others
    assert origin.explanation is not None
    assert (origin.check, origin.explanation.cause) == (CheckName.ACTIVATIONS, Cause.FORWARD)
    assert origin.explanation.subject.module == module


def test_what_is_wrong_behind_the_backward_pass_is_placed_at_no_module(runs: Path) -> None:
    result = compare(runs, f"norm-twice{MIXED}")
    assert {finding.check for finding in result.findings if not finding.follows} == {CheckName.GRADIENT_NORM}
