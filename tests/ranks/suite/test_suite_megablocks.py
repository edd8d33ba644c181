"""megablocks' expert parallelism with its conventions broken; the cases of `cases/` hold it as it is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from moeverify.case.load import load_cases
from moeverify.suite.options import RunOptions
from moeverify.suite.run import run_cases

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("megablocks") is None,
        reason="needs megablocks: `make megablocks` installs it",
    ),
    pytest.mark.timeout(900),  # in Triton's interpreter, on a machine that may be busy
]

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("fault", "parameters", "scale"),
    [
        ("forget_the_share_of_ep", ("experts.gate", "experts.up", "experts.down"), 0.5),
        ("sum_router_gradients", ("router.weight",), 2.0),
    ],
)
def test_a_wrong_factor_is_found_and_named(
    tmp_path: Path, fault: str, parameters: tuple[str, ...], scale: float
) -> None:
    overrides = ("recipe.steps=1", "checks.repeat=never", "checks.timeout=600.0")
    cases = load_cases([ROOT / "cases" / "megablocks-ep2.yaml"], overrides=overrides)
    options = RunOptions(device="cpu", golden_folder=tmp_path, fault=f"megablocks_faults:{fault}")
    result = run_cases(cases, options, lambda event: None)
    assert result is not None
    case = result.cases[0]
    assert case.verdict == "mismatch", case.reason
    wrong = [finding for finding in case.findings if finding.check == "gradient"]
    assert {finding.tensor for finding in wrong} == {
        f"layers.{layer}.moe.{name}" for layer in range(2) for name in parameters
    }
    assert all(finding.scale == pytest.approx(scale) for finding in wrong)
    assert {check.name for check in case.checks if check.verdict == "pass"} >= {"loss", "routing", "replicas"}
