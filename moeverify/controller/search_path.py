"""Where the functions that a case names are looked for. No torch."""

from __future__ import annotations

from pathlib import Path

from moeverify.case.schema import Case


def search_path(case: Case) -> list[str]:
    """Return the folders that come first on the import path of a case: that of its file, then the current one.

    Where the case file lies inside a package (a folder with `__init__.py`), the first folder above it that is
    none takes its place, as with pytest, so that the package keeps its name.
    """
    folders = [Path.cwd()]
    if case.file:
        folder = Path(case.file).resolve().parent
        while (folder / "__init__.py").is_file() and folder.parent != folder:
            folder = folder.parent
        folders.insert(0, folder)
    return list(dict.fromkeys(map(str, folders)))
