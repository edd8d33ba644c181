"""A script that does not use moeverify, recorded on one device and on two ranks, and compared.

The right script runs under `moeverify watch` and torchrun. With each bug it runs on forked ranks, which
start the recorder themselves: importing torch for each of them takes longer than their training.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from forked.python import ForkedPython

from moeverify.results.cause import Cause
from moeverify.results.finding import Finding
from moeverify.results.observation import OtherPasses
from moeverify.results.run import CaseResult
from moeverify.results.script import CallRule, ScriptCheck
from moeverify.scripts.compare.compare import compare_runs
from moeverify.scripts.record.read import RecordedRun

PROGRAMS = Path(__file__).parent / "programs"
BUGS = (
    *("zero-grad", "no-zero", "late-zero", "scheduler", "data", "forgotten"),
    *("experts", "divisor", "router", "alike", "norm-twice", "local-norm", "combine"),
)

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def watch(
    out: Path, *command: str, options: tuple[str, ...] = (), python: Sequence[str] = (sys.executable,)
) -> subprocess.CompletedProcess[str]:
    words = [*python, "-m", "moeverify", "watch", "--steps", "0-1", "--out", str(out), *options, "--"]
    return subprocess.run([*words, *command], capture_output=True, text=True, check=False)


class Recordings:
    """The runs of one program, each made once."""

    def __init__(self, folder: Path, python: ForkedPython) -> None:
        self.folder, self.python = folder, python

    @cache  # noqa: B019 - lives as long as the module's fixture
    def one(self, name: str, *options: str) -> RecordedRun:
        # The exit code is the script's, whatever it is.
        python = self.python.command()
        command = (*python, str(PROGRAMS / "train_ep.py"), "--exit", "7")
        done = watch(self.folder / name, *command, options=tuple(options), python=python)
        assert done.returncode == 7, done.stderr
        return RecordedRun.read(self.folder / name)

    def many(self) -> RecordedRun:
        out = self.folder / "clean"
        command = (*self.python.torchrun(2), str(PROGRAMS / "train_ep.py"))
        done = watch(out, *command, python=self.python.command())
        assert done.returncode == 0, done.stderr
        return RecordedRun.read(out)

    @cache  # noqa: B019 - lives as long as the module's fixture
    def with_bugs(self) -> Path:
        folder = self.folder / "bugs"
        loaded = f"loaded={self.one('nudged', '--nudge', '1').folder}"
        words = [
            *self.python.command(),
            str(PROGRAMS / "record_bugs.py"),
            "train_ep.py",
            "2",
            str(folder),
            *BUGS,
            loaded,
        ]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return folder

    def compare(self, bug: str) -> CaseResult:
        assert bug in BUGS
        return compare_runs(self.one("one", "--outputs"), RecordedRun.read(self.with_bugs() / bug))


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory, python: ForkedPython) -> Recordings:
    return Recordings(tmp_path_factory.mktemp("runs"), python)


@pytest.fixture(scope="module")
def reducing(tmp_path_factory: pytest.TempPathFactory, python: ForkedPython) -> Path:
    """Return a folder with runs of the script whose optimizer reduces, on one device and on two ranks."""
    folder = tmp_path_factory.mktemp("reducing")
    program = str(PROGRAMS / "train_reducing.py")
    runs = {"one": python.command(), "two": python.torchrun(2)}
    commands = {name: (*command, program) for name, command in runs.items()}
    commands |= {bug: (*commands["two"], "--bug", bug) for bug in ("unreduced", "divisor")}
    for name, command in commands.items():
        done = watch(folder / name, *command, python=python.command())
        assert done.returncode == 0, done.stderr
    return folder


def origins(result: CaseResult) -> list[Finding]:
    return [finding for finding in result.findings if not finding.follows]


def test_a_right_script_passes_with_measured_bounds_and_without(recordings: Recordings) -> None:
    expected, actual = recordings.one("one", "--outputs"), recordings.many()
    for noise in (None, recordings.one("nudged", "--nudge", "1")):
        result = compare_runs(expected, actual, noise)
        assert result.verdict == "pass"
        assert {check.name for check in result.checks if check.tensors} >= {"batch", "gradient", "update"}


@pytest.mark.parametrize(
    ("bug", "check", "about"),
    [
        ("zero-grad", ScriptCheck.CALLS, CallRule.DISCARDED),
        ("no-zero", ScriptCheck.CALLS, CallRule.KEPT),
        ("late-zero", ScriptCheck.CALLS, CallRule.EMPTIED),
        ("scheduler", ScriptCheck.CALLS, CallRule.SCHEDULER),
        ("data", ScriptCheck.BATCH, "input 0"),
        ("forgotten", ScriptCheck.PARAMETERS, "blocks.0.experts.down"),
    ],
)
def test_what_must_be_equal_is_reported_before_any_tensor(
    recordings: Recordings, bug: str, check: str, about: str
) -> None:
    result = recordings.compare(bug)
    assert result.verdict == "mismatch"
    assert (origins(result)[0].check, origins(result)[0].tensor) == (check, about)


@pytest.mark.parametrize(
    ("bug", "kind", "text"),
    [("data", "branch", "batch = batch.roll(3, 0)"), ("forgotten", "definition", "model.named_parameters()")],
)
def test_the_line_that_differs_from_one_device_is_named(
    recordings: Recordings, bug: str, kind: str, text: str
) -> None:
    first = origins(recordings.compare(bug))[0].origins[0]
    assert (first.kind, text in first.line.expression) == (kind, True)


@pytest.mark.parametrize(
    ("bug", "cause", "source"),
    [
        ("experts", Cause.SCALE, "ranks"),
        ("divisor", Cause.SCALE, "micro-batches"),
        ("router", Cause.MISSING_REDUCTION, "ranks"),
        ("alike", Cause.DUPLICATE, None),
    ],
)
def test_a_wrong_gradient_or_initial_value_has_its_cause(
    recordings: Recordings, bug: str, cause: Cause, source: str | None
) -> None:
    (origin,) = origins(recordings.compare(bug))
    assert origin.explanation is not None
    assert origin.explanation.cause is cause
    assert {name for product in origin.explanation.candidates for name in product.sources} == (
        {source} if source else set()
    )


@pytest.mark.parametrize(
    ("bug", "part", "times"), [("norm-twice", "replicated", 2.0), ("local-norm", "local", 1.0)]
)
def test_a_wrong_norm_is_told_from_wrong_gradients(
    recordings: Recordings, bug: str, part: str, times: float
) -> None:
    (origin,) = origins(recordings.compare(bug))
    assert origin.check == "gradient norm"
    assert origin.facts is not None
    assert origin.facts.about == "norm"
    assert (origin.facts.part, origin.facts.times) == (part, times)


def test_the_first_module_that_diverges_is_named(recordings: Recordings) -> None:
    (origin,) = origins(recordings.compare("combine"))
    assert (origin.check, origin.tensor, origin.step, origin.ranks) == ("activations", "blocks.0", 0, (0, 1))
    assert origin.explanation is not None
    assert (origin.explanation.cause, origin.explanation.subject.module) == (Cause.FORWARD, "blocks.0")


def test_an_error_without_a_known_cause_is_flagged_and_not_named(recordings: Recordings) -> None:
    expected, actual = (
        recordings.one("one", "--outputs"),
        RecordedRun.read(recordings.with_bugs() / "combine"),
    )
    for rank in actual.ranks:
        rank.outputs.clear()
    result = compare_runs(expected, actual)
    assert any("has not recorded them in RUN_B" in note for note in result.notes)
    (origin,) = origins(result)
    assert origin.check == "gradient"
    assert origin.explanation is None
    assert origin.unexplained
    # The single device has 4 forward passes of 2 rows, the ranks 4 of 1 row: a balance loss would differ.
    (passes,) = (seen for seen in origin.observations if isinstance(seen, OtherPasses))
    assert (passes.expected, passes.actual) == ((2,) * 4, (1,) * 8)


def test_a_run_that_dies_keeps_its_exit_code_its_output_and_its_steps(recordings: Recordings) -> None:
    out = recordings.folder / "dead"
    program = str(PROGRAMS / "train_ep.py")
    python = recordings.python.command()
    done = watch(out, *python, program, "--die-at", "1", "--steps", "3", python=python)
    assert done.returncode == 1
    assert done.stdout.startswith("step 0 loss ")
    assert "the script died on purpose" in done.stderr
    result = compare_runs(recordings.one("one", "--outputs"), RecordedRun.read(out))
    assert result.verdict == "pass"
    assert any("ended after step 0" in note for note in result.notes)


def test_a_script_that_trains_nothing_keeps_its_exit_code_too(tmp_path: Path) -> None:
    done = watch(tmp_path / "out", sys.executable, "-c", "print('done')")
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "nothing was recorded" in done.stderr


def test_a_script_that_asks_for_torch_before_it_imports_it_is_recorded(tmp_path: Path) -> None:
    # As transformers and accelerate do: a module that a finder returns is not always loaded.
    program = tmp_path / "asks.py"
    program.write_text(
        "import importlib.util\n"
        "assert importlib.util.find_spec('torch') is not None\n"
        "import torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "optimizer.step()\n"
    )
    done = watch(tmp_path / "out", sys.executable, str(program))
    assert done.returncode == 0, done.stderr
    assert RecordedRun.read(tmp_path / "out").steps == [0]


def test_weights_of_another_run_are_put_into_every_layout(recordings: Recordings) -> None:
    nudged = recordings.one("nudged", "--nudge", "1")
    result = compare_runs(nudged, RecordedRun.read(recordings.with_bugs() / "loaded"))
    assert result.verdict == "pass"
    assert next(check for check in result.checks if check.name == "initial state").tensors == len(
        nudged.names
    )


def test_a_full_disk_stops_the_recording_and_not_the_script(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "moeverify", "watch", "--out", str(tmp_path / "out"), "--"]
    command = " ".join([*words, sys.executable, str(PROGRAMS / "train_ep.py")])
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 200; {command}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.count("step ") == 2
    assert "recording stopped at step 0: OSError" in done.stderr


def test_an_optimizer_may_reduce_gradients_that_the_script_divides(reducing: Path) -> None:
    result = compare_runs(RecordedRun.read(reducing / "one"), RecordedRun.read(reducing / "two"))
    assert result.verdict == "pass"
    assert any("reduces gradients" in note and "train_reducing.py:" in note for note in result.notes)
    assert next(check.tensors for check in result.checks if check.name == "update")


@pytest.mark.parametrize(("bug", "check"), [("unreduced", "gradient"), ("divisor", "optimizer state")])
def test_an_optimizer_that_reduces_hides_no_bug(reducing: Path, bug: str, check: str) -> None:
    result = compare_runs(RecordedRun.read(reducing / "one"), RecordedRun.read(reducing / bug))
    assert origins(result)[0].check == check
    if bug == "unreduced":
        assert origins(result)[0].explanation is not None
        assert origins(result)[0].explanation.cause == Cause.MISSING_REDUCTION
