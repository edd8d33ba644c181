"""Gathered weights under real layouts: a stale group is found in bfloat16, and clean runs pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from moeverify.cases.schema import Case
from moeverify.faults.setting import make_case
from moeverify.results.run import CaseResult
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases

CLEAN: Mapping[str, Case] = {
    "fsdp1": make_case("fsdp1", preset="stress-tied", dp_shard=2, data_parallel="fsdp1"),
    "mixed": make_case(
        "mixed", recipe={"precision": "mixed"}, dp_shard=2, ep=2, micro_batches=2, recompute=True
    ),
}
STALE = make_case("stale", recipe={"precision": "bfloat16"}, dp_shard=2)

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, known_goldens: Path) -> Mapping[str, CaseResult]:
    """Return the results of the cases, all run in one launch of two ranks."""
    folder = tmp_path_factory.mktemp("gathered")
    options = RunOptions(
        device="cpu",
        golden_folder=folder / "golden",
        cache_folder=known_goldens,
        require_goldens=False,
        case_faults={"stale": "moeverify.faults.catalogue.optimizer:n02_stale_compute_weights"},
    )
    result = run_cases([*CLEAN.values(), STALE], options, lambda event: None)
    assert result is not None
    return {case.name: case for case in result.cases}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_layout_gathers_what_it_stores(results: Mapping[str, CaseResult], name: str) -> None:
    case = results[name]
    assert case.verdict == "pass"
    (check,) = [check for check in case.checks if check.name == "gathered weights"]
    assert (check.verdict, check.tensors > 30) == ("pass", True)


def test_stale_weights_of_one_block_are_named_in_bfloat16(results: Mapping[str, CaseResult]) -> None:
    lead = results["stale"].lead
    assert lead is not None
    assert (lead.check, lead.tensor, lead.step, lead.ranks) == ("gathered weights", "layers.1", 1, (0, 1))
    assert lead.code == "stale"
