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


LAZY = """\
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        raise RuntimeError("operator torchvision::nms does not exist")
    except RuntimeError as error:
        raise ModuleNotFoundError(f"could not import {name}") from error
"""


@pytest.mark.parametrize(
    "user", ["", f"from {NAME} import build\n"], ids=["named itself", "imported by a user"]
)
def test_a_lazy_module_that_cannot_import_a_part_names_the_first_error(user: str, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.py").write_text(LAZY)
    (tmp_path / "user_of_lazy.py").write_text(user)
    with import_path([str(tmp_path)]), pytest.raises(CaseError) as caught:
        resolve("user_of_lazy:build" if user else f"{NAME}:build", "recipe.model.factory")
    (problem,) = caught.value.problems
    assert "could not import build" in problem.message
    assert "caused by RuntimeError" in problem.message
    assert "nms does not exist" in problem.message
    assert "in a Python shell" in problem.remedy
    assert "None" not in problem.remedy


def test_a_missing_package_is_to_be_installed(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.py").write_text("import no_such_package\n")
    with import_path([str(tmp_path)]), pytest.raises(CaseError) as caught:
        resolve(f"{NAME}:build", "recipe.model.factory")
    assert "`no_such_package`" in caught.value.problems[0].remedy
