"""megablocks' expert parallelism with its conventions broken; the cases of `cases/` hold it as it is."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from moeverify.controller.options import RunOptions
from moeverify.controller.run import run_cases
from moeverify.results.run import CaseResult
from moeverify.validation.load import load_cases

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("megablocks") is None,
        reason="needs megablocks: `make megablocks` installs it",
    ),
    pytest.mark.timeout(900),  # in Triton's interpreter, on a machine that may be busy
]

ROOT = Path(__file__).parents[3]


def run_with(fault: str, case: str, folder: Path) -> CaseResult:
    """Return the result of the first step of a case with a fault in it."""
    overrides = ("recipe.steps=1", "checks.repeat=never", "checks.timeout=600.0")
    cases = load_cases([ROOT / "cases" / f"{case}.yaml"], overrides=overrides)
    options = RunOptions(device="cpu", golden_folder=folder, fault=f"megablocks_faults:{fault}")
    result = run_cases(cases, options, lambda event: None)
    assert result is not None
    assert result.cases[0].verdict == "mismatch", result.cases[0].reason
    return result.cases[0]


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
    case = run_with(fault, "megablocks-ep2", tmp_path)
    wrong = [finding for finding in case.findings if finding.check == "gradient"]
    assert {finding.tensor for finding in wrong} == {
        f"layers.{layer}.moe.{name}" for layer in range(2) for name in parameters
    }
    assert all(finding.scale == pytest.approx(scale) for finding in wrong)
    assert {check.name for check in case.checks if check.verdict == "pass"} >= {"loss", "routing", "replicas"}


def test_its_own_balance_loss_and_the_gradient_from_it_are_compared(tmp_path: Path) -> None:
    case = run_with("forget_the_number_of_layers", "megablocks-own-losses", tmp_path)
    losses = {finding.tensor: finding for finding in case.findings if finding.check == "loss"}
    assert set(losses) == {"balance", "total"}
    assert losses["balance"].scale == pytest.approx(0.5)  # of two layers
    wrong = {finding.tensor for finding in case.findings if finding.check == "gradient"}
    assert wrong >= {"layers.0.moe.router.weight", "layers.1.moe.router.weight"}
    assert "layers.1.moe.experts.down" not in wrong  # behind the last router
    assert {check.name for check in case.checks if check.verdict == "pass"} >= {"routing", "replicas"}


def test_ranks_of_a_users_own_torchrun_run_them_too(tmp_path: Path) -> None:
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "moeverify",
        "run",
    ]
    words = [str(ROOT / "cases" / "megablocks-ep2.yaml"), "--device", "cpu", "--cache", str(tmp_path)]
    done = subprocess.run([sys.executable, *launcher, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 case: 1 pass" in done.stdout
