"""Loading cases skips pydantic's plugin search; other code in the process still gets its plugins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moeverify.cli.arguments import CaseSelection
from moeverify.cli.context import own_sections
from moeverify.errors import CaseError

NAME = "PYDANTIC_DISABLE_PLUGINS"


@pytest.mark.parametrize("before", [None, "logfire-plugin"])
def test_plugins_are_left_out_for_a_while(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is None:
        monkeypatch.delenv(NAME, raising=False)
    else:
        monkeypatch.setenv(NAME, before)

    @own_sections()
    def fail() -> None:
        raise KeyError(os.environ[NAME])

    with pytest.raises(KeyError, match="__all__"):
        fail()
    assert os.environ.get(NAME) == before


def test_a_selection_reads_cases_without_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def look(*_: object, **__: object) -> None:
        seen.append(os.environ.get(NAME))
        raise CaseError([])

    monkeypatch.delenv(NAME, raising=False)
    monkeypatch.setattr("moeverify.cases.validation.load.load_cases", look)
    monkeypatch.setattr("moeverify.cases.validation.load.load_valid_cases", look)
    monkeypatch.setattr("moeverify.cases.validation.sweep.load_sweep", look)
    selection = CaseSelection([tmp_path])
    for load in (selection.load, selection.load_valid, lambda: selection.load_sweep([])):
        with pytest.raises(CaseError):
            load()
    assert seen == ["__all__"] * 3
    assert NAME not in os.environ
