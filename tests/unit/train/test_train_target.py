"""Functions of users that cases name: cases of one process must mean the same file by a name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeverify.errors import CaseError
from moeverify.train.target import import_path, resolve

NAME = "stack_of_two_cases"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    sys.modules.pop(NAME, None)


def write_stack(folder: Path) -> Path:
    folder.mkdir()
    (folder / f"{NAME}.py").write_text("def build():\n    return None\n")
    return folder


def test_a_stack_may_be_reached_by_two_paths(tmp_path: Path) -> None:
    first = write_stack(tmp_path / "first")
    second = tmp_path / "second"
    second.mkdir()
    (second / f"{NAME}.py").symlink_to(first / f"{NAME}.py")
    with import_path([str(first)]):
        expected = resolve(f"{NAME}:build", "recipe.model.factory")
    with import_path([str(second)]):
        assert resolve(f"{NAME}:build", "recipe.model.factory") is expected


def test_another_file_of_the_same_name_is_refused(tmp_path: Path) -> None:
    first, second = write_stack(tmp_path / "first"), write_stack(tmp_path / "second")
    with import_path([str(first)]):
        resolve(f"{NAME}:build", "recipe.model.factory")
    with import_path([str(second)]), pytest.raises(CaseError) as caught:
        resolve(f"{NAME}:build", "recipe.model.factory")
    assert str(second) in str(caught.value)
    assert str(first) in str(caught.value)
