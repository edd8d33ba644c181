from __future__ import annotations

from pathlib import Path

import pytest

from moeverify.controller.options import RunOptions
from moeverify.controller.run import run_cases
from moeverify.model.expert_backends import megablocks
from moeverify.validation.choices import find_obstacle
from moeverify.validation.load import load_cases

CASES = Path(__file__).parents[3] / "cases"


@pytest.fixture
def without_megablocks(monkeypatch) -> None:
    monkeypatch.setattr(megablocks, "NEEDED", ("no_such_package",))


@pytest.mark.usefixtures("without_megablocks")
def test_a_case_whose_package_is_missing_is_skipped_with_the_reason() -> None:
    result = run_cases(load_cases([CASES / "megablocks.yaml"]), RunOptions(device="cpu"), lambda event: None)
    assert result is not None
    assert result.cases[0].verdict == "skipped"
    assert "no_such_package cannot be imported" in result.cases[0].reason
    assert "make megablocks" in result.cases[0].reason


@pytest.mark.usefixtures("without_megablocks")
def test_other_cases_need_no_package() -> None:
    assert find_obstacle(load_cases([CASES / "ep2.yaml"])[0], "cpu") == ""


def test_float64_is_for_the_interpreter(monkeypatch) -> None:
    monkeypatch.setattr(megablocks, "NEEDED", ())
    exact, single = (load_cases([CASES / f"megablocks{name}.yaml"])[0] for name in ("", "-fp32"))
    assert find_obstacle(exact, "cpu") == ""
    assert "float32" in find_obstacle(exact, "cuda")
    assert find_obstacle(single, "cuda") == ""


def test_torchs_context_parallel_is_for_gpus() -> None:
    case = load_cases([CASES / "cp-torch.yaml"])[0]
    assert "no kernel for the CPU" in find_obstacle(case, "cpu")
    assert find_obstacle(case, "cuda") == ""
