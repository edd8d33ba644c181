"""`moeverify convert` as a user sees it: both directions, its last line and its errors."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import Result

from moeverify.report.transfer import describe_transfer, open_transfer

Invoke = Callable[..., Result]

PRESET = "tiny-mixtral-8x7b"


def test_weights_go_there_and_back(invoke: Invoke, start: Path, tmp_path: Path) -> None:
    hf, back, again = tmp_path / "hf", tmp_path / "mega", tmp_path / "again"
    done = invoke("convert", start, hf, "--to", "hf", "--preset", PRESET)
    assert done.exit_code == 0, done.stderr
    assert f"{start} (dcp) -> {hf} (hf): 23 tensors, " in done.stdout
    assert " kB in 1 file, " in done.stdout
    assert invoke("convert", hf, back, "--to", "megablocks", "--quiet").exit_code == 0
    assert invoke("convert", back, again, "--to", "hf", "--shard-size", "0.0001").exit_code == 0
    assert (hf / "config.json").read_bytes() == (again / "config.json").read_bytes()
    assert len(list(again.glob("model-*-of-*.safetensors"))) > 2
    assert (again / "model.safetensors.index.json").exists()


def test_a_config_says_which_model_it_is(invoke: Invoke, start: Path, tmp_path: Path) -> None:
    assert invoke("convert", start, tmp_path / "hf", "--to", "hf", "--preset", PRESET).exit_code == 0
    done = invoke("convert", start, tmp_path / "b", "--to", "dcp", "--config", tmp_path / "hf/config.json")
    assert done.exit_code == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "hf"], "neither config.json nor model.json says which model this is; give a preset"),
        (["--to", "hf", "--preset", "mixtrl"], "unknown preset `mixtrl`"),
        (["--to", "hf", "--preset", "tiny-gpt"], "is no tensor of this model"),
        (["--to", "hf", "--preset", PRESET, "--config", "x"], "--preset and --config both say which model"),
        (["--to", "hf", "--config", "missing.json"], "missing.json: there is no such file"),
        (["--to", "parquet"], "'parquet' is not one of 'hf', 'dcp', 'megablocks'"),
        ([], "Missing option '--to'"),
    ],
)
def test_what_is_wrong_is_said(
    invoke: Invoke, start: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    done = invoke("convert", start, tmp_path / "out", *words)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_folder_without_weights_is_no_source(invoke: Invoke, tmp_path: Path) -> None:
    done = invoke("convert", tmp_path, tmp_path / "out", "--to", "dcp")
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{tmp_path}: no weights are there" in " ".join(done.stderr.split())
    done = invoke("convert", tmp_path / "gone", tmp_path / "out", "--to", "dcp")
    assert "there is no such folder" in done.stderr


def test_a_bar_is_for_terminals_only() -> None:
    for is_terminal in (True, False):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=is_terminal, width=100, _environ={"TERM": "xterm"})
        with open_transfer(console) as on_progress:
            on_progress("layers.11.moe.experts.gate", 512_000, 2_048_000)
        assert ("layers.11.moe.experts.gate" in screen.getvalue()) == is_terminal
        assert ("0.5/2.0 MB" in screen.getvalue()) == is_terminal


def test_a_log_says_now_and_then_how_much_is_left() -> None:
    now = [0.0]
    for quiet, lines in ((False, ["500.0 MB of 2.0 GB, about 36 s left"]), (True, [])):
        log = io.StringIO()
        with open_transfer(Console(file=log, width=100), quiet=quiet, clock=lambda: now[0]) as on_progress:
            for seconds, done in ((1, 100), (11, 500), (4, 900), (9, 2_000)):
                now[0] += seconds
                on_progress("layers.0", done * 1_000_000, 2_000_000_000)
        assert log.getvalue().splitlines() == lines


def test_the_last_line_has_fitting_units() -> None:
    assert describe_transfer(3, 2_500_000_000, 2, 10.0) == "3 tensors, 2.5 GB in 2 files, 10.0 s, 250 MB/s"
    assert describe_transfer(1, 900, 1, 0.0).startswith("1 tensors, 900 bytes in 1 file, 0.0 s, ")
