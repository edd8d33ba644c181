"""Exceptions of a user's program: told as the user's, whatever their text is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moeverify.errors import MOST_TEXT, cut_text
from moeverify.train.target import describe_error
from moeverify.verification.collectives.trace import CollectiveTrace
from moeverify.verification.launch import failure_reporter
from moeverify.verification.launch.evidence import Death, collect_reports


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no text for you")

    __repr__ = __str__


@pytest.fixture
def reporter(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(failure_reporter, "leave_traces", lambda *_, **__: None)
    return failure_reporter.FailureReporter(Path(), 1, CollectiveTrace(), False)


def test_an_exception_whose_text_raises_is_reported_with_its_type(reporter: Any) -> None:
    report = reporter.describe_error(Silent())
    assert report.end.error == "Silent: (its __str__ raised ValueError)"
    assert "Silent" in report.stack
    assert describe_error(Silent()) == "Silent: (its __str__ raised ValueError)"


def test_a_huge_message_is_cut_with_a_note_and_keeps_its_frames(reporter: Any) -> None:
    try:
        try:
            raise KeyError("K" * 3_000_000)
        except KeyError as error:
            raise RuntimeError("H" * 3_000_000) from error
    except RuntimeError as error:
        report = reporter.describe_error(error)
        message = describe_error(error)
    assert len(report.stack) < 10 * MOST_TEXT
    assert report.stack.count("characters are left out here") == 2
    assert report.stack.count('raise KeyError("K"') == report.stack.count('raise RuntimeError("H"') == 1
    assert report.end.error.startswith("RuntimeError: HHH")
    assert len(message) < 2 * MOST_TEXT


def test_an_error_in_a_triton_kernel_without_a_gpu_says_that_it_needs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "triton" / "driver.py"
    code = compile("raise RuntimeError('0 active drivers ([])')", str(file), "exec")
    for has_gpu, said in ((False, "Triton kernels need a GPU"), (True, "0 active drivers ([])")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        with pytest.raises(RuntimeError) as caught:
            exec(code)
        assert said in describe_error(caught.value)
    assert describe_error(caught.value).endswith("0 active drivers ([])")


def test_an_error_that_points_to_what_stands_above_it_brings_the_end_of_stderr(
    reporter: Any, tmp_path: Path
) -> None:
    for rank, text in ((0, "see the above report"), (1, "no such key")):
        report = reporter.describe_error(RuntimeError(text)).model_copy(update={"rank": rank})
        (tmp_path / f"rank-{rank}.json").write_text(report.model_dump_json())
        (tmp_path / f"rank-{rank}.err").write_text("".join(f"line {number}\n" for number in range(40)))
    reports = collect_reports(tmp_path, tmp_path, [0, 1], Death()).reports
    assert reports[0].stack.endswith(
        "The end of its stderr:\n" + "\n".join(f"line {n}" for n in range(28, 40))
    )
    assert "stderr" not in reports[1].stack


def test_short_texts_are_whole() -> None:
    assert cut_text("a" * MOST_TEXT) == "a" * MOST_TEXT
