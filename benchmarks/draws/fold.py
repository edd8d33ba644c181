"""Plants as users write them: the wrong line for ranks and for one device, without a switch around it.

A switch gives ranks a line that one device does not execute, which real bugs seldom do. Folding replaces the
test of a plant's switch by `True` or `False`, in a copy of the stack, so both sides execute the same lines. It
applies to plants whose wrong line computes the right result on one device, such as a missing reduction.
"""

from __future__ import annotations

import ast
import shutil
from dataclasses import replace
from pathlib import Path

from loader import STACKS, Plant


def fold(plant: Plant, folder: Path) -> Plant | None:
    """Return a plant in its own copy of the stack, or None if it has no switch that can be folded."""
    if plant.way != "run" or plant.fault or plant.is_clean:
        return None
    source = STACKS / plant.stack
    texts = {path: path.read_text() for path in sorted(source.rglob("*.py"))}
    folded = {path: fold_text(text, plant.id) for path, text in texts.items()}
    if folded == texts:
        return None
    package = folder / plant.id
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(source, package / plant.stack, ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in folded.items():
        (package / plant.stack / path.relative_to(source)).write_text(text)
    return replace(plant, package=package)


def fold_text(text: str, name: str) -> str:
    """Return source code with the tests of one switch replaced. Line numbers stay the same."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    for node, value in sorted(_list_tests(ast.parse(text), name), key=lambda test: -test[0].lineno):
        assert node.end_lineno == node.lineno, f"{name}: a switch of several lines"
        line = lines[node.lineno - 1]
        lines[node.lineno - 1] = line[: node.col_offset] + str(value).encode() + line[node.end_col_offset :]
    return b"".join(lines).decode()


def _list_tests(tree: ast.AST, name: str) -> list[tuple[ast.expr, bool]]:
    """Return the expressions that ask whether a switch is on, with their values when it is."""
    found: list[tuple[ast.expr, bool]] = []
    decorators = {id(item) for node in ast.walk(tree) for item in getattr(node, "decorator_list", ())}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and id(node) not in decorators:
            names = node.args
            value = True
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            (right,) = node.comparators
            names = right.elts if isinstance(right, ast.Tuple | ast.Set | ast.List) else [right]
            value = isinstance(node.ops[0], ast.Eq | ast.In | ast.Is)
        else:
            continue
        if any(isinstance(item, ast.Constant) and item.value == name for item in names):
            found.append((node, value))
    return found
