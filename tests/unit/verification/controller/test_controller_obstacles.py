from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moeverify.cases.validation.load import load_cases
from moeverify.model.expert_backends import megablocks
from moeverify.report.words.note import describe_obstacle
from moeverify.results.obstacle import (
    MissingPackages,
    RankLimit,
    TooFewRanks,
    UnsupportedHere,
)
from moeverify.verification.controller.machine import Machine
from moeverify.verification.controller.obstacles import find_obstacle
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases

CASES = Path(__file__).parents[4] / "cases"
LIMIT = RankLimit(most=8, by="processes")
ON_CPU = Machine("cpu", "auto", 0, LIMIT)
ON_GPUS = Machine("cuda", "auto", 8, LIMIT)
ON_ONE_GPU = Machine("cuda", "auto", 1, LIMIT)


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
    assert find_obstacle(load_cases([CASES / "ep2.yaml"])[0], ON_CPU) is None
    missing = find_obstacle(load_cases([CASES / "megablocks.yaml"])[0], ON_CPU)
    assert isinstance(missing, MissingPackages)
    assert missing.packages == ("no_such_package",)


def test_float64_is_for_the_interpreter(monkeypatch) -> None:
    monkeypatch.setattr(megablocks, "NEEDED", ())
    exact, single = (load_cases([CASES / f"megablocks{name}.yaml"])[0] for name in ("", "-fp32"))
    assert find_obstacle(exact, ON_CPU) is None
    refused = find_obstacle(exact, ON_GPUS)
    assert isinstance(refused, UnsupportedHere)
    assert "float32" in describe_obstacle(refused)
    assert find_obstacle(single, ON_GPUS) is None


def test_torchs_context_parallel_is_for_gpus() -> None:
    case = load_cases([CASES / "cp-torch.yaml"])[0]
    refused = find_obstacle(case, ON_CPU)
    assert isinstance(refused, UnsupportedHere)
    assert "no kernel for the CPU" in describe_obstacle(refused)
    assert find_obstacle(case, ON_GPUS) is None


def test_graphs_are_for_gpus() -> None:
    case = load_cases([CASES / "ep2-graphs.yaml"])[0]
    refused = find_obstacle(case, ON_CPU)
    assert isinstance(refused, UnsupportedHere)
    assert "need a GPU" in describe_obstacle(refused)
    assert find_obstacle(case, ON_GPUS) is None
    shared = find_obstacle(case, ON_ONE_GPU)
    assert isinstance(shared, UnsupportedHere)
    assert "collectives of gloo" in describe_obstacle(shared)


def test_a_layout_larger_than_the_limit() -> None:
    case = load_cases([CASES / "ep4.yaml"])[0]
    limit = RankLimit(most=2, by="option")
    obstacle = find_obstacle(case, replace(ON_CPU, limit=limit))
    assert obstacle == TooFewRanks(num_needed=4, limit=limit)
    assert describe_obstacle(obstacle) == "needs 4 ranks; --ranks 2"


def test_too_few_gpus_name_the_way_to_share_them() -> None:
    case = load_cases([CASES / "ep4.yaml"])[0]
    machine = Machine("cuda", "nccl", 1, RankLimit(most=1, by="gpus"))
    obstacle = find_obstacle(case, machine)
    assert obstacle is not None
    described = describe_obstacle(obstacle)
    assert described.startswith("needs 4 ranks; this machine has 1 GPU, and NCCL needs one a rank;")
    assert "without `--backend nccl`" in described
    assert find_obstacle(case, ON_ONE_GPU) is None
