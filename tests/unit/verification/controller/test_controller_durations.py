"""Durations of earlier runs: they are stored, and a broken file is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeverify.results.finding import CheckResult
from moeverify.results.run import CaseResult
from moeverify.verification.controller.durations import Durations
from moeverify.verification.controller.options import RunOptions

CHECKS = (CheckResult(name="loss", verdict="pass", tensors=1),)


def make_case(name: str, seconds: float) -> CaseResult:
    return CaseResult(name=name, file="", verdict="pass", ranks=2, seconds=seconds, checks=CHECKS)


def test_the_last_duration_of_each_case_and_device_counts(tmp_path: Path) -> None:
    durations = Durations.of(RunOptions(device="cpu", cache_folder=tmp_path))
    assert durations.read(["a"]) == {}
    durations.keep([make_case("a", 1.234), make_case("b", 2.0)])
    durations.keep(
        [make_case("a", 3.0), CaseResult(name="c", file="", verdict="error", ranks=2, seconds=9.0)]
    )
    assert durations.read(["a", "b", "c", "d"]) == {"a": 3.0, "b": 2.0}
    assert Durations.of(RunOptions(device="cuda", cache_folder=tmp_path)).read(["a"]) == {}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "\xff",
        *(f'{{"cpu a": {value}}}' for value in ('"x"', "null", "1e999", "NaN", "-5", "1e300")),
    ],
)
def test_a_file_that_is_something_else_is_written_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / "durations.json").write_text(content, encoding="latin-1")
    durations = Durations.of(RunOptions(device="cpu", cache_folder=tmp_path))
    assert durations.read(["a"]) == {}
    durations.keep([make_case("a", 1.0)])
    assert durations.read(["a"]) == {"a": 1.0}


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    durations = Durations.of(RunOptions(device="cpu", cache_folder=tmp_path / "file"))
    durations.keep([make_case("a", 1.0)])
    assert durations.read(["a"]) == {}
