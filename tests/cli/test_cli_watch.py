"""Options of `moeverify watch` that cannot be used: all of them are listed at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from moeverify.cli import build_app


def test_all_bad_options_are_listed_also_without_a_folder(tmp_path: Path) -> None:
    words = ["watch", "--steps", "3-1", "--nudge-dtype", "bfloat16", "--weights", str(tmp_path), "--", "true"]
    done = CliRunner().invoke(build_app(), words)
    assert done.exit_code == 2
    options = ("--steps", "--out", "--nudge-dtype", "--weights")
    assert [option for option in options if option in done.output] == list(options)


@pytest.mark.parametrize(
    ("words", "refused", "accepted"),
    [
        (["--guard", "--seed", "1", "--outputs", "--every", "4"], ["--seed", "--outputs"], "--every"),
        (["--out", "run", "--seed", "1", "--every", "4", "--debug"], ["--every", "--debug"], "--seed"),
    ],
)
def test_options_without_effect_are_refused(words: list[str], refused: list[str], accepted: str) -> None:
    done = CliRunner().invoke(build_app(), ["watch", *words, "--", "true"])
    assert done.exit_code == 2
    assert all(f"error: {option}:" in done.output for option in refused)
    assert accepted not in done.output
