"""`moeverify bench`: what a step costs, on real ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeverify.results.measurement import BenchRun


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_cases_are_measured_side_by_side(tmp_path: Path, case_file: Path, invoke: Callable[..., Any]) -> None:
    other = tmp_path / "too-large.yaml"
    other.write_text(case_file.read_text().replace("dp_shard: 2", "dp_replicate: 2\n  dp_shard: 4"))
    file = tmp_path / "bench.json"
    done = invoke(
        "bench",
        case_file,
        other,
        "--device",
        "cpu",
        "--ranks",
        2,
        "--steps",
        3,
        "--warmup",
        1,
        "--json",
        file,
    )
    assert done.exit_code == 3, done.output  # one of the two was not measured
    assert "too-large: not measured: needs 8 ranks; --ranks 2" in done.stdout
    result = BenchRun.model_validate(json.loads(file.read_text()))
    found, refused = result.cases
    assert (found.name, found.ranks, refused.step) == ("fsdp2-2", 2, None)
    assert found.step is not None
    assert found.roofline is not None
    assert 0 < found.step.least <= found.step.median <= found.step.most
    assert found.tokens_per_second == pytest.approx(8 * 16 / found.step.median)
    assert found.flops is not None
    assert found.peak_memory is not None
    assert found.peak_memory > (found.parameters or 0) > 0
    assert {"all_gather"} <= {traffic.kind for traffic in found.traffic}
    assert all(traffic.seconds > 0 and traffic.count > 0 for traffic in found.traffic)
    assert set(found.roofline.collectives) == {"all_to_all", "all_gather", "reduce_scatter", "all_reduce"}
    assert found.roofline.matmul > found.flops > 0
    assert found.in_micro_batches is not None
    assert found.in_update is not None
    assert found.in_micro_batches.kernels > found.in_update.kernels > 0
    assert found.in_micro_batches.collectives > 0
    assert found.in_micro_batches.waits == 0  # a dense model has no sizes that the host must know
    assert "operations of all passes" in done.stdout
    assert "fsdp2-2" in done.stdout


def test_a_bad_case_is_refused_before_anything_runs(tmp_path: Path, invoke: Callable[..., Any]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("recipe: nowhere\n")
    assert invoke("bench", path).exit_code == 2


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, case_file: Path, invoke: Callable[..., Any]
) -> None:
    (tmp_path / "taken").write_text("")
    done = invoke("bench", case_file, "--device", "cpu", "--json", tmp_path / "taken" / "bench.json")
    assert done.exit_code == 2, done.output
    assert "bench.json" in done.stderr
    assert "starting ranks" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", 0], "--steps"),
        (["--warmup", 0], "--warmup"),
        (["--ranks", 0], "--ranks"),
        (["--timeout", 0], "--timeout"),
        (["--set", "layout.ep=3"], "layout.ep: ep 3 needs a model with experts"),
        (["-k", "nothing"], "no case matches `nothing`"),
    ],
)
def test_bad_usage_is_refused_before_anything_runs(
    arguments: list[Any], said: str, case_file: Path, invoke: Callable[..., Any]
) -> None:
    done = invoke("bench", case_file, *arguments)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert "starting ranks" not in done.stdout


def test_where_nothing_was_measured_nothing_is_explained(case_file: Path, invoke: Callable[..., Any]) -> None:
    done = invoke("bench", case_file, "--device", "cpu", "--ranks", 1)
    assert done.exit_code == 3, done.output
    assert "fsdp2-2: not measured: needs 2 ranks; --ranks 1" in done.stdout
    assert "median" not in done.stdout
