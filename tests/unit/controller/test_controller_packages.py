from __future__ import annotations

from pathlib import Path

import pytest

from moeverify.case.load import load_cases
from moeverify.controller import packages
from moeverify.controller.options import RunOptions
from moeverify.controller.run import run_cases

CASES = Path(__file__).parents[3] / "cases"


@pytest.fixture
def without_megablocks(monkeypatch) -> None:
    monkeypatch.setattr(packages, "_MEGABLOCKS", ("no_such_package",))


@pytest.mark.usefixtures("without_megablocks")
def test_a_case_whose_package_is_missing_is_skipped_with_the_reason() -> None:
    result = run_cases(load_cases([CASES / "megablocks.yaml"]), RunOptions(device="cpu"), lambda event: None)
    assert result is not None
    assert result.cases[0].verdict == "skipped"
    assert "no_such_package cannot be imported" in result.cases[0].reason
    assert "make megablocks" in result.cases[0].reason


@pytest.mark.usefixtures("without_megablocks")
def test_other_cases_need_no_package() -> None:
    assert packages.find_obstacle(load_cases([CASES / "ep2.yaml"])[0], "cpu") == ""


def test_float64_is_for_the_interpreter(monkeypatch) -> None:
    monkeypatch.setattr(packages, "_MEGABLOCKS", ())
    exact, single = (load_cases([CASES / f"megablocks{name}.yaml"])[0] for name in ("", "-fp32"))
    assert packages.find_obstacle(exact, "cpu") == ""
    assert "float32" in packages.find_obstacle(exact, "cuda")
    assert packages.find_obstacle(single, "cuda") == ""


def test_torchs_context_parallel_is_for_gpus() -> None:
    case = load_cases([CASES / "cp-torch.yaml"])[0]
    assert "no kernel for the CPU" in packages.find_obstacle(case, "cpu")
    assert packages.find_obstacle(case, "cuda") == ""
