"""A MoE in bfloat16 under FSDP2 against autocast on one device: different rounding changes the routing.

Both are right. Without a measurement of the noise the comparison must neither report a mismatch for
rounding nor pass a bug. One device runs under `moeverify watch`; ranks are forked from one process.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest
from forked.python import ForkedPython

from moeverify.scripts.compare.compare import compare_runs
from moeverify.scripts.record.read import RecordedRun

PROGRAMS, SCRIPT = Path(__file__).parent / "programs", "train_fsdp_moe.py"
BUGS = ("double", "half")
RIGHT = "none"
NARROW = ("--nudge", "1", "--nudge-dtype", "bfloat16")

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


class Recordings:
    """Runs of the script, each made once."""

    def __init__(self, folder: Path, python: ForkedPython) -> None:
        self.folder, self.python = folder, python

    @cache  # noqa: B019 - lives as long as the module's fixture
    def take(self, name: str, *options: str) -> RecordedRun:
        python = self.python.command()
        words = [*python, "-m", "moeverify", "watch", "--steps", "0-1", "--out", str(self.folder / name)]
        done = subprocess.run(
            [*words, *options, "--", *python, str(PROGRAMS / SCRIPT)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return RecordedRun.read(self.folder / name)

    @cache  # noqa: B019 - lives as long as the module's fixture
    def on_ranks(self) -> Path:
        """Return the folder with the right script on two ranks, and with each bug."""
        folder = self.folder / "ranks"
        words = [
            *self.python.command(),
            str(PROGRAMS / "record_bugs.py"),
            SCRIPT,
            "2",
            str(folder),
            RIGHT,
            *BUGS,
        ]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return folder


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory, python: ForkedPython) -> Recordings:
    pytest.importorskip("transformers")
    return Recordings(tmp_path_factory.mktemp("runs"), python)


def test_a_right_script_is_no_mismatch_and_what_is_open_is_said(recordings: Recordings) -> None:
    result = compare_runs(recordings.take("one"), RecordedRun.read(recordings.on_ranks() / RIGHT))
    assert result.verdict == "pass"
    assert not result.findings
    by_name = {check.name: check for check in result.checks}
    assert {tensor.tensor.split(".")[3] for tensor in by_name["gradient"].inconclusive_tensors} <= {
        "mlp",
        "post_attention_layernorm",
    }
    assert by_name["gradient"].inconclusive > 0
    assert result.notes[0].startswith(f"not decided: {by_name['gradient'].inconclusive} gradient")


def test_measured_noise_decides_what_the_dtype_leaves_open(recordings: Recordings) -> None:
    noise = recordings.take("noise", *NARROW)
    result = compare_runs(recordings.take("one"), RecordedRun.read(recordings.on_ranks() / RIGHT), noise)
    assert result.verdict == "pass"
    assert not any("not decided" in note or "bounds come from" in note for note in result.notes)


def test_noise_of_wide_weights_is_no_measurement_of_narrow_arithmetic(recordings: Recordings) -> None:
    wide = recordings.take("wide", "--nudge", "1")
    result = compare_runs(recordings.take("one"), RecordedRun.read(recordings.on_ranks() / RIGHT), wide)
    assert result.verdict == "pass"
    assert any("--nudge-dtype bfloat16" in note for note in result.notes)


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_a_mismatch_with_measured_noise_and_without(recordings: Recordings, bug: str) -> None:
    for noise in (None, recordings.take("noise", *NARROW)):
        result = compare_runs(recordings.take("one"), RecordedRun.read(recordings.on_ranks() / bug), noise)
        assert result.verdict == "mismatch"
        assert next(finding for finding in result.findings if not finding.follows).check == "gradient"
