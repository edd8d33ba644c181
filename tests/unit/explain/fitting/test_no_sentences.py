"""Sentences are written in report/words only: the code that finds and carries causes has none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[4] / "moeverify"
FILES = sorted(
    [
        *(PACKAGE / "explain" / "fitting").rglob("*.py"),
        *(path for path in (PACKAGE / "results").rglob("*.py") if path.stem != "checks"),  # describes them
        PACKAGE / "verification" / "worker" / "investigate.py",
        PACKAGE / "verification" / "controller" / "follow_up.py",
        PACKAGE / "verification" / "controller" / "separation.py",
        PACKAGE / "verification" / "controller" / "fault_benchmark.py",
        PACKAGE / "faults" / "fault.py",
    ]
)
FEWEST_WORDS = 3
# Methods that split or change a text. They are allowed on paths and fully qualified names.
PARSING = {"replace", "partition", "rpartition", "split", "rsplit", "removeprefix", "removesuffix"}
OF_NAMES = {
    "explain/fitting/recomputed.py",  # the moment at the end of a state's name
    "explain/fitting/router_findings.py",  # the block at the start of a router's name, and the ways of a rule
    "explain/fitting/families.py",  # parts of a fully qualified name
    "explain/fitting/parameter_parts.py",  # likewise
    "explain/fitting/first_divergence.py",
    "explain/fitting/place.py",
    "explain/fitting/loading.py",  # the kind at the start of a saved tensor's name
    "explain/fitting/failure.py",  # the path of a file
    "explain/fitting/diagnosis.py",  # the name of a dtype
    "explain/fitting/fit.py",  # of tensors
    "explain/fitting/hypotheses/rounding.py",
    "verification/worker/investigate.py",
}


def list_sentences(path: Path) -> Iterator[str]:
    """Yield texts of some words, without docstrings, raised errors, members of enums and literals."""
    tree = ast.parse(path.read_text())
    spared: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr | ast.Raise) or _is_literal(node):
            spared |= set(ast.walk(node))
        elif isinstance(node, ast.ClassDef):
            for field in node.body:
                spared |= set(ast.walk(field)) if isinstance(field, ast.Assign | ast.AnnAssign) else set()
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and node not in spared and len(node.value.split()) >= FEWEST_WORDS:  # type: ignore[attr-defined]
            yield f"{path.name}:{node.lineno}: {node.value}"  # type: ignore[attr-defined]


def _is_literal(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_sentence_is_made_and_no_text_is_taken_apart(path: Path) -> None:
    assert list(list_sentences(path)) == []
    calls = {
        node.func.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    if str(path.relative_to(PACKAGE)) not in OF_NAMES:
        assert not calls & PARSING
