"""Case files in a temporary folder, and what loading them says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from moeverify.case.load import load_cases
from moeverify.errors import CaseError, Problem

Write = Callable[[str, str], Path]
FindProblems = Callable[..., list[Problem]]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def do(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip("\n"), encoding="utf-8")
        return path

    return do


@pytest.fixture
def find_problems() -> FindProblems:
    """Return a function like `load_cases` that returns the problems; none if there is no error."""

    def do(*paths: Path, **options: object) -> list[Problem]:
        try:
            load_cases(paths, **options)  # type: ignore[arg-type]
        except CaseError as error:
            return error.problems
        return []

    return do
