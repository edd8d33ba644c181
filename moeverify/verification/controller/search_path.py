"""Import path for the functions that a case names. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moeverify.cases.function import examine_function
from moeverify.cases.schema import Case
from moeverify.errors import Problem


def search_path(case: Case) -> list[str]:
    """Return the first folders of the import path of a case: that of its file, then the current one.

    If the case file is inside a package (a folder with `__init__.py`), the nearest parent folder that is
    not a package is used instead, as in pytest. The package then keeps its name.
    """
    folders = [Path.cwd()]
    if case.file:
        folders.insert(0, find_package_parent(Path(case.file)))
    return list(dict.fromkeys(map(str, folders)))


def examine_functions(case: Case) -> Iterator[Problem]:
    """Yield a problem for each function that a case names and Python would not find, without importing it."""
    folders = search_path(case)
    for path, target in {
        **case.recipe.functions,
        "layout.parallelize": case.layout.parallelize or "",
    }.items():
        problem = examine_function(target, folders, path) if target else None
        if problem is not None:
            yield problem


def find_package_parent(file: Path) -> Path:
    """Return the folder of a file, or, inside a package, the nearest parent folder that is not one."""
    folder = file.resolve().parent
    while (folder / "__init__.py").is_file() and folder.parent != folder:
        folder = folder.parent
    return folder
