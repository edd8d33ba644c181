"""Passes on tensors with fixed addresses, as a CUDA graph needs: a CPU simulates the launches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moeverify.cases.schema import Case
from moeverify.faults.setting import make_case
from moeverify.parallel import graphs
from moeverify.results.run import CaseResult
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

PADDED: Mapping[str, Any] = {"dp_shard": 2, "ep": 2, "dispatch": "padded"}
NARROW: Mapping[str, Any] = {"recipe": {"precision": "bfloat16"}, "experts": "grouped_mm"}


def make_captured(name: str, **fields: Any) -> Case:
    """Return a case with graphs. A rule refuses float64, although a CPU can simulate it."""
    small = {"model": {"num_layers": 2}}
    case = make_case(name, **{**small, "micro_batches": 2, "reshard": "step", **fields})
    return case.model_copy(update={"layout": case.layout.model_copy(update={"graphs": "micro_batch"})})


CLEAN = (
    make_captured("experts whole on a rank", **PADDED, recipe={"steps": 3}),
    make_captured("experts sharded by FSDP2", dp_shard=2),
    make_captured("tied", preset="stress-tied", dp_shard=2, micro_batches=4),
    make_captured("given routing", **PADDED, **NARROW),
    make_captured("joined", **PADDED, **NARROW, micro_batches=4, joined_micro_batches=2),
)
WRONG = {
    "play_with_stale_weights": make_captured("stale", **PADDED),
    "play_without_zeroing": make_captured("unzeroed", **PADDED),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, CaseResult]:
    """Return the results of the cases, all run in one launch of two ranks."""
    folder = tmp_path_factory.mktemp("graphs")
    faults = {case.name: "play" for case in CLEAN} | {case.name: fault for fault, case in WRONG.items()}
    options = RunOptions(
        device="cpu",
        golden_folder=folder / "golden",
        cache_folder=folder / "cache",
        case_faults={name: f"graph_stand_ins:{fault}" for name, fault in faults.items()},
        explain_seconds=0.0,  # these tests are about the checks
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs._MicroBatch, "find_obstacle", lambda *_: None)
        path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        result = run_cases([*CLEAN, *WRONG.values()], options, lambda event: None)
    assert result is not None
    return {case.name: case for case in result.cases}


@pytest.mark.parametrize("name", [case.name for case in CLEAN])
def test_passes_on_fixed_tensors_compute_what_one_device_does(
    results: Mapping[str, CaseResult], name: str
) -> None:
    case = results[name]
    assert case.verdict == "pass", case.reason
    made = {check.name: check.tensors for check in case.checks}
    assert all(made[kind] for kind in ("gradient", "update", "routing weights", "loss"))
    # Hooks do not run in a graph launch: checks that need them must not be reported as done.
    assert made.keys().isdisjoint({"data", "gathered weights", "router", "router gradient"})


def test_weights_that_are_not_gathered_anew_are_found(results: Mapping[str, CaseResult]) -> None:
    lead = results["stale"].lead
    assert lead is not None
    assert lead.step == 1


def test_what_a_capture_adds_to_gradients_is_found(results: Mapping[str, CaseResult]) -> None:
    lead = results["unzeroed"].lead
    assert lead is not None
    assert (lead.step, lead.check) == (0, "gradient")
