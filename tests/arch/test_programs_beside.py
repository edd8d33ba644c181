"""Benchmarks and documentation scripts, which no test runs, import only names that still exist."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted([*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("docs/*.py")])


def find_lost(source: str) -> Iterator[str]:
    """Yield the names that a program imports from `moeverify` or its debugger and that do not exist."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
            continue
        if node.module.split(".")[0] not in {"moeverify", "multiprocessing_pdb"}:
            continue
        try:
            module = importlib.import_module(node.module)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in {"moeverify", "multiprocessing_pdb"}:
                yield f"line {node.lineno}: {node.module}"
            continue  # an optional package that is not installed
        for alias in node.names:
            if not hasattr(module, alias.name) and not _is_module(f"{node.module}.{alias.name}"):
                yield f"line {node.lineno}: {node.module}.{alias.name}"


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("path", PROGRAMS, ids=[path.stem for path in PROGRAMS])
def test_programs_import_what_is_there(path: Path) -> None:
    assert not list(find_lost(path.read_text()))


def test_a_lost_name_is_seen() -> None:
    source = "def work():\n    from moeverify.errors import CaseError, Lost\n    from moeverify.lost import thing\n"
    assert list(find_lost(source)) == ["line 2: moeverify.errors.Lost", "line 3: moeverify.lost"]
