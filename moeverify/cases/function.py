"""Static check that `package.module:function` exists, without importing it and before ranks start."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moeverify.cases.suggest import suggest
from moeverify.errors import Problem
from moeverify.input_file import read_input

_ELSE = "name the module that defines it"
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def examine_function(target: str, folders: Sequence[str], path: str) -> Problem | None:
    """Return the problem with the name of a function, or None if none is found.

    `folders` precede `sys.path`. `path` is the option or field that contains the name. Names that a module
    creates only at run time are not visible here, so a module with a star import or `__getattr__` passes.
    """
    if not _TARGET.fullmatch(target):
        return Problem(f"`{target}` is no function", path=path, remedy="write `package.module:function`")
    module, _, name = target.partition(":")
    spec, missing = _find_module(module, [*folders, *sys.path])
    if missing:
        path_start = f"; the import path begins with {folders[0]}" if folders else ""
        remedy = f"start the command in the folder that contains it, or set PYTHONPATH{path_start}"
        return Problem(f"there is no module `{missing}` for `{target}`", path=path, remedy=remedy)
    origin = spec.origin if spec is not None else None
    if origin is None or not origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(read_input(Path(origin)), origin)
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        where = f"{origin}:{error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else ""
        # The other exceptions mean nesting that is too deep, or null bytes.
        return Problem(where or f"{origin} cannot be parsed", path=path, remedy=f"mend it for `{target}`")
    names = set(_list_names(tree.body))
    if name.partition(".")[0] in names or "*" in names or "__getattr__" in names:
        return None
    made = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    functions = [own for own in made if own[0] != "_"]
    return Problem(
        f"`{module}` ({origin}) has no `{name}`", path=path, remedy=suggest(name, functions) or _ELSE
    )


def read_defaults(target: str, folders: Sequence[str]) -> dict[str, Any]:
    """Return the constant defaults of the parameters of a function or class, as far as its source shows them."""
    module, _, name = target.partition(":")
    spec, _ = _find_module(module, [*folders, *sys.path])
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return {}
    try:
        body = ast.parse(read_input(Path(spec.origin))).body
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        return {}
    found = next((node for node in body if getattr(node, "name", "") == name), None)
    if isinstance(found, ast.ClassDef):
        found = next((node for node in found.body if getattr(node, "name", "") == "__init__"), None)
    if not isinstance(found, ast.FunctionDef):
        return {}
    positional = [*found.args.posonlyargs, *found.args.args]
    last = positional[len(positional) - len(found.args.defaults) :]
    pairs: list[tuple[ast.arg, ast.expr | None]] = [*zip(last, found.args.defaults, strict=True)]
    pairs += zip(found.args.kwonlyargs, found.args.kw_defaults, strict=True)
    return {each.arg: value.value for each, value in pairs if isinstance(value, ast.Constant)}


def _find_module(name: str, folders: Sequence[str]) -> tuple[importlib.machinery.ModuleSpec | None, str]:
    """Return the spec of a module, or else the shortest prefix of its name that does not exist."""
    spec: importlib.machinery.ModuleSpec | None = None
    places: Sequence[str] | None = folders
    parts = name.split(".")
    if parts[0] in sys.builtin_module_names:
        return None, ""
    for number, part in enumerate(parts):
        # Search for the last part of the name only: for the full name, Python would import the parent
        # packages.
        spec = importlib.machinery.PathFinder.find_spec(part, places) if places is not None else None
        if spec is None and number == 0:
            spec = find_installed(part)
        if spec is None:
            return None, ".".join(parts[: number + 1])
        found = spec.submodule_search_locations
        places = None if found is None else list(found)
    return spec, ""


def find_installed(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a top-level module that this Python can import, or None.

    Unlike `sys.path` alone, this includes packages that an editable install finds by a finder of its own.
    """
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def list_top_modules(targets: Iterable[str | None]) -> list[str]:
    """Return the top-level modules of functions `package.module:function`, each once; None is left out."""
    return sorted({target.partition(":")[0].partition(".")[0] for target in targets if target})


def _list_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that these statements bind at the top level of a module."""
    for statement in body:
        for node in ast.walk(statement) if not isinstance(statement, ast.FunctionDef | ast.ClassDef) else ():
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.alias):
                yield (node.asname or node.name).partition(".")[0]
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield statement.name
