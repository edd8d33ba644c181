"""Exceptions of a user's program: told as the user's, whatever their text is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moeverify.errors import MOST_TEXT, cut_text
from moeverify.train.target import describe_error
from moeverify.verification.collectives.trace import CollectiveTrace
from moeverify.verification.launch import failure_reporter


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


def test_short_texts_are_whole() -> None:
    assert cut_text("a" * MOST_TEXT) == "a" * MOST_TEXT
