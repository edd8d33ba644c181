"""`moeverify bench`: the cost of a step, on real ranks."""

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
        "--iterations",
        3,
        "--warmup",
        1,
        "--json",
        file,
        "--profile",
        tmp_path / "profile",
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
    assert found.in_micro_batches.waits == 0  # a dense model has no sizes that the host needs
    assert found.in_micro_batches.traffic is not None
    assert found.in_micro_batches.traffic > 2 * (
        found.parameters or 0
    )  # weights are read in forward and backward
    assert "operations of all passes" in done.stdout
    assert all(f"floor of {part}" in done.stdout for part in ("operations", "bytes", "launches"))
    assert sorted(path.name for path in (tmp_path / "profile" / "fsdp2-2").iterdir()) == [
        "rank-0.json.gz",
        "rank-1.json.gz",
        "step.png",
    ]
    assert len(found.profile) == 2
    for step in found.profile:
        assert 0 < step.computed + step.idle <= step.seconds
        assert "all_gather" in step.communicating
    assert {"matrix products", "collectives"} <= {work.kind for work in found.work}
    assert "work of rank 0" in done.stdout
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
        (["--iterations", 0], "--iterations"),
        (["--warmup", 0], "--warmup"),
        (["--ranks", 0], "--ranks"),
        (["--timeout", 0], "--timeout"),
        (["--set", "layout.ep=3"], "layout.ep: ep 3 needs a model with experts"),
        (["-k", "nothing"], "no case matches `nothing`"),
        (["--sweep", "layout.ep"], "expected `path=value,value`, got `layout.ep`"),
        (["--sweep", "layout.ep=3,5"], "layout.ep: ep 3 needs a model with experts"),
        (["--plots", "plots"], "--plots: shows a sweep, and there is none"),
    ],
)
def test_bad_usage_is_refused_before_anything_runs(
    arguments: list[Any], said: str, case_file: Path, invoke: Callable[..., Any]
) -> None:
    done = invoke("bench", case_file, *arguments)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert "starting ranks" not in done.stdout


def test_a_sweep_measures_what_its_case_allows_and_says_why_not_the_rest(
    case_file: Path, invoke: Callable[..., Any]
) -> None:
    sweep = ("--sweep", "layout.dp_shard=2,3", "--sweep", "recipe.data.seq_len=16,24")
    done = invoke("bench", case_file, "--device", "cpu", "--ranks", 1, *sweep)
    assert done.exit_code == 3, done.output
    assert "fsdp2-2 dp_shard=2 seq_len=16: not measured: needs 2 ranks; --ranks 1" in done.stdout
    assert "fsdp2-2 dp_shard=2 seq_len=24: not measured: needs 2 ranks; --ranks 1" in done.stdout
    assert "\ndp_shard=3 seq_len=16: not measured: " in done.stdout
    assert "recipe.data.batch 8 is not divisible by dp_shard 3" in done.stdout


def test_where_nothing_was_measured_nothing_is_explained(case_file: Path, invoke: Callable[..., Any]) -> None:
    done = invoke("bench", case_file, "--device", "cpu", "--ranks", 1)
    assert done.exit_code == 3, done.output
    assert "fsdp2-2: not measured: needs 2 ranks; --ranks 1" in done.stdout
    assert "median" not in done.stdout


@pytest.mark.ranks
def test_what_was_measured_before_an_interrupt_is_printed(
    tmp_path: Path, case_file: Path, invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moeverify.report.progress import LineProgress

    other = tmp_path / "second.yaml"
    other.write_text(case_file.read_text())
    show = LineProgress.on_event

    def interrupt(progress: LineProgress, event: Any) -> None:
        show(progress, event)
        if event.kind == "case-end":
            raise KeyboardInterrupt

    monkeypatch.setattr(LineProgress, "on_event", interrupt)
    file = tmp_path / "bench.json"
    options = ("--device", "cpu", "--ranks", 2, "--iterations", 1, "--warmup", 1, "--json", file)
    done = invoke("bench", case_file, other, *options)
    assert done.exit_code == 130, done.output
    found, missing = BenchRun.model_validate(json.loads(file.read_text())).cases
    assert found.step is not None
    assert missing.step is None
    assert f"{missing.name}: not measured" in done.stdout
    assert "1/2" in done.stdout
