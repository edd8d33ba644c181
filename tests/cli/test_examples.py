"""The examples of users' own models: the docs show their run, and right ones pass every check."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from forked.python import ForkedPython
from shown_samples import RUN, assert_shown, samples

from moeverify.report.formats.json import read_run
from moeverify.results.run import CaseResult

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(900)]

CHECKS = {"initial state", "loss", "gradient", "gradient norm", "update", "replicas", "coverage", "repeat"}


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, python: ForkedPython
) -> tuple[str, Mapping[str, CaseResult]]:
    """Return the sample of the run of all examples, and the results of their cases."""
    file = tmp_path_factory.mktemp("examples") / "result.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "PYTHON", python.command())
        patch.setattr(samples, "run", lambda line: RUN(f"{line} --json {file}"))
        sample = samples.OUTPUTS["own-models"]()
        further = file.with_name("further.json")
        RUN(f"moeverify run examples/my_moe --goldens examples/golden --json {further}")
    return sample, {case.name: case for path in (file, further) for case in read_run(path).cases}


@pytest.fixture
def results(run: tuple[str, Mapping[str, CaseResult]]) -> Mapping[str, CaseResult]:
    return run[1]


def test_the_run_is_the_one_that_the_docs_show(run: tuple[str, Mapping[str, CaseResult]]) -> None:
    assert_shown("own-models", run[0])


def test_all_examples_pass(results: Mapping[str, CaseResult]) -> None:
    assert {case.verdict for case in results.values()} == {"pass"}
    assert {"my-gpt-fsdp-tp", "my-moe-hsdp-ep", "my-moe-own-step"} <= set(results)


@pytest.mark.parametrize("name", ["my-gpt-ddp", "my-gpt-fsdp2", "my-gpt-tp", "my-moe-ep"])
def test_example_passes_every_check(results: Mapping[str, CaseResult], name: str) -> None:
    case = results[name]
    assert (case.verdict, case.reason) == ("pass", "")
    checks = {check.name: check for check in case.checks}
    assert set(checks) >= CHECKS
    worst = checks["gradient"].worst
    assert worst is not None
    assert 0 < worst.error <= worst.bound  # how far below depends on the processor


def test_every_parameter_of_the_example_is_compared(results: Mapping[str, CaseResult]) -> None:
    # 2 layers of 18 (4 linear layers of attention, 2 head norms, 2 norms, 2 linear layers), and 5 more.
    num_parameters, num_steps = 2 * (4 * 2 + 2 + 2 * 2 + 2 * 2) + 5, 2
    checks = {check.name: check for check in results["my-gpt-tp"].checks}
    assert checks["gradient"].tensors == num_parameters * num_steps
    assert checks["update"].tensors == num_parameters * num_steps
    assert checks["optimizer state"].tensors == num_parameters * num_steps * 3
    assert checks["initial state"].tensors == num_parameters + 1  # the buffer
    assert checks["buffers"].tensors == num_steps


def test_data_axes_are_held_to_their_claim(results: Mapping[str, CaseResult]) -> None:
    sharding = {
        name: next((check for check in case.checks if check.name == "sharding"), None)
        for name, case in results.items()
    }
    assert sharding["my-gpt-ddp"] is not None
    assert sharding["my-gpt-ddp"].tensors == 1
