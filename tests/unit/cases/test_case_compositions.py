"""Each commonly trained composition has a case: pipelines under every schedule, and every triple of axes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moeverify.cases.schema import Case, Layout, ReferenceModel
from moeverify.cases.validation.load import load_cases
from moeverify.verification.golden.file import golden_path, read_golden

ROOT = Path(__file__).parents[3]
SCHEDULES = ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]
TRIPLES: dict[str, Callable[[Layout], bool]] = {
    "FSDP + PP + CP": lambda layout: layout.dp_shard > 1 and layout.pp > 1 and layout.cp > 1,
    "HSDP + CP + EP": lambda layout: (
        layout.dp_replicate > 1 and layout.dp_shard > 1 and layout.cp > 1 and layout.ep > 1
    ),
    "TP + EP + SP, etp 1": lambda layout: (
        layout.tp > 1 and layout.ep > 1 and layout.sequence_parallel and layout.expert_tp == 1
    ),
    "TP + EP + SP, etp tp": lambda layout: (
        layout.tp > 1 and layout.ep > 1 and layout.sequence_parallel and layout.expert_tp == layout.tp
    ),
}
TABLE: dict[str, Callable[[Layout], bool]] = {
    "FSDP 2": lambda layout: layout.dp_shard == layout.world_size == 2,
    "FSDP 2 (EP 2) + TP 2 + PP 2": lambda layout: (
        (layout.dp_shard, layout.ep, layout.tp, layout.pp, layout.world_size) == (2, 2, 2, 2, 8)
    ),
    "HSDP 4 (DP 2, CP 2, EP 4) + TP 2": lambda layout: (
        (layout.data_ranks, layout.cp, layout.ep, layout.tp, layout.world_size) == (2, 2, 4, 2, 8)
    ),
}


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Return the cases in float64, under measured tolerances, with no check left out."""
    return [case for case in load_cases([ROOT / "cases"]) if is_exacting(case)]


def is_exacting(case: Case) -> bool:
    checks = case.checks
    is_plain = checks.tolerance.kind == "calibrated" and not checks.skip and not checks.differs
    return is_plain and case.recipe.precision == "float64"


def has_golden(case: Case, folder: Path) -> bool:
    recorded = read_golden(golden_path(folder, case.recipe.name, "cpu"))
    return recorded is not None and recorded.recipe == case.recipe.fingerprint()


def balances(case: Case) -> bool:
    """Return whether the routers of the case have both auxiliary losses."""
    model = case.recipe.model
    if not isinstance(model, ReferenceModel) or model.moe is None:
        return False
    return model.moe.balance_coef > 0 and model.moe.z_coef > 0


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_schedule_has_a_case_with_auxiliary_losses(
    schedule: str, is_tied: bool, cases: list[Case]
) -> None:
    found = [
        case
        for case in cases
        if case.layout.pp > 1
        and case.layout.pipeline_schedule == schedule
        and isinstance(case.recipe.model, ReferenceModel)
        and case.recipe.model.tie_embedding == is_tied
        and balances(case)
        and has_golden(case, ROOT / "golden")
    ]
    assert found


@pytest.mark.parametrize("name", TRIPLES)
def test_each_triple_has_a_case(name: str, cases: list[Case]) -> None:
    assert [case for case in cases if TRIPLES[name](case.layout) and has_golden(case, ROOT / "golden")]


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@pytest.mark.parametrize("name", TABLE)
def test_each_row_of_torchtitans_table_has_a_case(name: str, optimizer: str) -> None:
    folder = ROOT / "examples"
    found = [
        case
        for case in load_cases([folder / "torchtitan"])
        if TABLE[name](case.layout)
        and (case.recipe.optimizer.name, case.recipe.steps) == (optimizer, 100)
        and is_exacting(case)
        and case.checks.steps == "free"
        and has_golden(case, folder / "golden")
    ]
    assert found
