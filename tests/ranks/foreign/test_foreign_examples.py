"""The examples of users' own models: right ones pass, and mistakes are found."""

from __future__ import annotations

from typing import Any

import pytest

CHECKS = {"initial state", "loss", "gradient", "gradient norm", "update", "replicas", "coverage", "repeat"}


@pytest.mark.parametrize("name", ["my-gpt-ddp", "my-gpt-fsdp2", "my-gpt-tp", "my-moe-ep"])
def test_example_passes_every_check(examples: Any, name: str) -> None:
    case = examples.results[name]
    assert (case.verdict, case.reason) == ("pass", "")
    checks = {check.name: check for check in case.checks}
    assert set(checks) >= CHECKS
    worst = checks["gradient"].worst
    assert worst is not None
    assert 0 < worst.error <= worst.bound  # how far below depends on the processor


def test_every_parameter_of_the_example_is_compared(examples: Any) -> None:
    # 2 layers of 18 (4 linear layers of attention, 2 head norms, 2 norms, 2 linear layers), and 5 more.
    num_parameters, num_steps = 2 * (4 * 2 + 2 + 2 * 2 + 2 * 2) + 5, 2
    checks = {check.name: check for check in examples.results["my-gpt-tp"].checks}
    assert checks["gradient"].tensors == num_parameters * num_steps
    assert checks["update"].tensors == num_parameters * num_steps
    assert checks["optimizer state"].tensors == num_parameters * num_steps * 3
    assert checks["initial state"].tensors == num_parameters + 1  # the buffer
    assert checks["buffers"].tensors == num_steps


def test_data_axes_are_held_to_their_claim(examples: Any) -> None:
    sharding = {
        name: next((check for check in case.checks if check.name == "sharding"), None)
        for name, case in examples.results.items()
    }
    assert sharding["my-gpt-ddp"] is not None
    assert sharding["my-gpt-ddp"].tensors == 1


def test_forgotten_head_norms_are_named(verify: Any) -> None:
    wrong = "layout.parallelize=my_gpt.wrong:parallelize"
    found = verify("my_gpt/tp", wrong, "checks.repeat=never")
    assert found.results["my-gpt-tp"].verdict == "mismatch"
    norms = {f"h.{layer}.attn.{name}_norm.weight" for layer in (0, 1) for name in ("query", "key")}
    replicas, gradients = (found.find("my-gpt-tp", check) for check in ("replicas", "gradient"))
    assert norms & set(replicas)
    assert gradients
    assert norms >= set(gradients)
    assert all("tp" in finding.coordinates for finding in gradients.values())


def test_sums_beside_averages_are_named(verify: Any) -> None:
    found = verify("my_moe/ep", "layout.parallelize=my_moe.wrong:parallelize", "checks.repeat=never")
    gradients = found.find("my-moe-ep", "gradient")
    experts = {f"tower.{layer}.experts.{name}" for layer in (0, 1) for name in ("w_in", "w_out")}
    assert gradients
    assert experts >= set(gradients)
    for finding in gradients.values():
        assert finding.scale == pytest.approx(2.0)
        assert finding.cosine == pytest.approx(1.0)
