"""megablocks' expert parallelism with its conventions broken; the cases of `cases/` cover the correct use."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from forked.python import ForkedPython

from moeverify.cases.validation.load import load_cases
from moeverify.results.run import CaseResult
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("megablocks") is None,
        reason="needs megablocks: `make megablocks` installs it",
    ),
    pytest.mark.timeout(900),  # in Triton's interpreter, on a machine that may be busy
]

ROOT = Path(__file__).parents[3]


# Each fault, and its case.
FAULTS = {
    "forget_the_share_of_ep": "megablocks-ep2",
    "sum_router_gradients": "megablocks-ep2",
    "forget_the_number_of_layers": "megablocks-own-losses",
}
OVERRIDES = ("recipe.steps=1", "checks.repeat=never", "checks.timeout=600.0")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def results(cache: Path) -> Mapping[str, CaseResult]:
    """Return the result of the first step of a case with each fault, all from one launch."""
    cases = []
    for fault, name in FAULTS.items():
        [case] = load_cases([ROOT / "cases" / f"{name}.yaml"], overrides=OVERRIDES)
        cases.append(case.model_copy(update={"name": fault}))
    options = RunOptions(
        device="cpu",
        golden_folder=cache / "none",
        cache_folder=cache,
        case_faults={fault: f"megablocks_faults:{fault}" for fault in FAULTS},
        explain_seconds=0.0,  # these tests are about the checks
    )
    result = run_cases(cases, options, lambda event: None)
    assert result is not None
    assert [case.verdict for case in result.cases] == ["mismatch"] * len(FAULTS), result.cases
    return {case.name: case for case in result.cases}


@pytest.mark.parametrize(
    ("fault", "parameters", "scale"),
    [
        ("forget_the_share_of_ep", ("experts.gate", "experts.up", "experts.down"), 0.5),
        ("sum_router_gradients", ("router.weight",), 2.0),
    ],
)
def test_a_wrong_factor_is_found_and_named(
    results: Mapping[str, CaseResult], fault: str, parameters: tuple[str, ...], scale: float
) -> None:
    case = results[fault]
    wrong = [finding for finding in case.findings if finding.check == "gradient"]
    assert {finding.tensor for finding in wrong} == {
        f"layers.{layer}.moe.{name}" for layer in range(2) for name in parameters
    }
    assert all(finding.scale == pytest.approx(scale) for finding in wrong)
    assert {check.name for check in case.checks if check.verdict == "pass"} >= {"loss", "routing", "replicas"}


def test_its_own_balance_loss_and_the_gradient_from_it_are_compared(
    results: Mapping[str, CaseResult],
) -> None:
    case = results["forget_the_number_of_layers"]
    losses = {finding.tensor: finding for finding in case.findings if finding.check == "loss"}
    assert set(losses) == {"balance", "total"}
    assert losses["balance"].scale == pytest.approx(0.5)  # of two layers
    wrong = {finding.tensor for finding in case.findings if finding.check == "gradient"}
    assert wrong >= {"layers.0.moe.router.weight", "layers.1.moe.router.weight"}
    assert "layers.1.moe.experts.down" not in wrong  # after the last router
    assert {check.name for check in case.checks if check.verdict == "pass"} >= {"routing", "replicas"}


def test_ranks_of_a_users_own_torchrun_run_them_too(cache: Path, python: ForkedPython) -> None:
    words = [*python.torchrun(2, "--standalone"), "-m", "moeverify", "run"]
    words += [str(ROOT / "cases" / "megablocks-ep2.yaml"), "--device", "cpu", "--cache", str(cache)]
    words += ["--goldens", str(cache / "none"), *(word for each in OVERRIDES for word in ("--set", each))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 case: 1 pass" in done.stdout


def test_nothing_differs_in_bfloat16_but_what_a_case_declares(cache: Path) -> None:
    names = ("megablocks", "megablocks-local-balance")
    overrides = (*OVERRIDES, "recipe.precision=bfloat16")
    cases = [
        case for name in names for case in load_cases([ROOT / f"cases/{name}.yaml"], overrides=overrides)
    ]
    options = RunOptions(device="cpu", golden_folder=cache / "none", cache_folder=cache, explain_seconds=0.0)
    result = run_cases(cases, options, lambda event: None)
    assert result is not None
    assert [case.verdict for case in result.cases] == ["pass", "pass"]
