"""The lower bounds of `moeverify bench`, and the pictures of a step and of a sweep."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from moeverify.report.bench import render_bench
from moeverify.report.formats.plots import write_step, write_sweep
from moeverify.report.pictures import step, sweep
from moeverify.results.measurement import BenchRun, Measurement, Operations, RankStep, Roofline, Spread


def make_measurement(name: str, seconds: float, **fields: object) -> Measurement:
    spread = Spread(median=seconds, least=seconds, most=seconds)
    made = {"tokens_per_second": 64 / seconds, "peak_memory": 2.0**31, **fields}
    return Measurement.model_validate({"name": name, "ranks": 2, "step": spread, **made})


def make_run(*cases: Measurement) -> BenchRun:
    return BenchRun(environment={}, warmup=1, steps=2, cases=cases)


def print_run(run: BenchRun) -> str:
    out = io.StringIO()
    render_bench(run, Console(file=out, width=200))
    return out.getvalue()


def test_floors_are_taken_at_the_rates_of_the_machine() -> None:
    case = make_measurement(
        "ep",
        2.0,
        flops=1e12,  # per second, so 2e12 per step
        in_micro_batches=Operations(kernels=900, collectives=4, waits=0, traffic=6_000_000_000),
        in_update=Operations(kernels=100, collectives=0, waits=0, traffic=2_000_000_000),
        roofline=Roofline(matmul=4e12, copying=16e9, launch=5e-6),
    )
    lines = {" ".join(line.split()[:3]): line.split() for line in print_run(make_run(case)).splitlines()}
    assert lines["floor of operations"][4:] == ["500.00", "TFLOP/s", "4"]
    assert lines["floor of bytes"][4:] == ["500.00", "GB/s", "16"]
    assert lines["floor of launches"][4:] == ["5.00", "us", "5"]


def test_a_rate_that_was_not_measured_gives_no_floor() -> None:
    text = print_run(make_run(make_measurement("ep", 2.0, flops=1e12, roofline=Roofline(matmul=4e12))))
    assert "floor of operations" in text
    assert "floor of bytes" not in text
    assert "floor of launches" not in text
    assert "work of rank 0" not in text  # no profile was requested


def test_the_picture_of_a_step_says_how_long_a_rank_did_what(tmp_path: Path) -> None:
    of_rank = RankStep(
        seconds=0.1,
        computed=0.05,
        idle=0.02,
        computing=((0.0, 0.05),),
        communicating={"all_to_all": ((0.04, 0.04),)},
    )
    case = make_measurement("<b>ep", 0.1, profile=(of_rank, of_rank))
    picture = step.draw(case)
    assert picture is not None
    assert picture.caption.startswith("Rank 0: 100 ms, computing 50 %, only collectives 30 %, neither 20 %.")
    write_step(case, tmp_path)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert step.draw(make_measurement("ep", 0.1)) is None


def test_a_sweep_has_a_line_for_each_value_of_the_fields_that_are_not_its_axis(tmp_path: Path) -> None:
    cases = [
        make_measurement(
            f"ep micro_batches={count} seq_len={length}",
            0.1 * count,
            swept={"layout.micro_batches": str(count), "recipe.data.seq_len": str(length)},
        )
        for count in (1, 2)
        for length in (16, 32)
    ]
    refused = Measurement(name="micro_batches=3", ranks=0, reason="why", swept=cases[0].swept)
    picture = sweep.draw([*cases, refused])
    assert picture is not None
    speed = picture.figure.axes[0]
    assert [line.get_label() for line in speed.get_lines()] == ["ep micro_batches=1", "ep micro_batches=2"]
    assert speed.get_lines()[0].get_ydata() == pytest.approx([640, 640])
    assert picture.caption == "Most tokens a second: ep micro_batches=1 seq_len=16, 640."
    write_sweep(make_run(*cases), tmp_path)
    assert (tmp_path / "sweep.png").is_file()
    write_sweep(make_run(make_measurement("ep", 1.0)), tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
