"""Case files in a temporary folder, and the problems found when loading them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from moeverify.cases.validation.load import load_cases
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


@pytest.fixture
def compose() -> Callable[[str, str], str]:
    """Return a function that makes a case file; fields of the recipe are given by their names alone."""
    return _compose


@pytest.fixture
def check_broken(write: Write, find_problems: FindProblems) -> Callable[..., None]:
    """Return a function that checks that a case is refused once for a path, with this message and remedy."""

    def do(layout: str, recipe: str, path: str, message: str, remedy: str) -> None:
        text = _compose(layout, recipe)
        file = write("case.yaml", text)
        found = [
            problem for problem in find_problems(file) if problem.path == path and message in problem.message
        ]
        assert len(found) == 1, find_problems(file)
        assert remedy in found[0].remedy
        assert found[0].file == str(file)
        section = {"layout": "layout:", "checks": "checks:"}.get(path.split(".", maxsplit=1)[0])
        other = next((name for name in ("optimizer", "precision") if name in path), "model")
        start = section or f"  {other}:"
        assert text.splitlines()[found[0].line - 1].startswith(start)

    return do


def _compose(layout: str, recipe: str) -> str:
    """Return a case file with these fields; those of the recipe are given by their names alone."""
    model, data, other, checks = [], [], [], []
    for field in _split(recipe):
        name = field.partition(":")[0]
        if name in {"optimizer", "precision", "steps"}:
            other.append(f"  {field}\n")
        elif name == "seq_len":
            data.append(field)
        elif name == "tolerance":
            checks.append(field)
        else:
            model.append(field)
    return (
        "name: a\n"
        f"recipe:\n  model: {{{', '.join(['preset: stress', *model])}}}\n"
        f"  data: {{{', '.join(['batch: 8', *data])}}}\n{''.join(other)}"
        f"layout: {{{layout}}}\nchecks: {{{', '.join(checks)}}}\n"
    )


def _split(fields: str) -> list[str]:
    """Return the top-level fields of a flow mapping's inside."""
    found, depth, start = [], 0, 0
    for index, letter in enumerate(fields + ","):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            found.append(fields[start:index].strip())
            start = index + 1
    return [field for field in found if field]
