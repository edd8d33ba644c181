"""Links that open a line of source in an editor, in texts that name it as `model.py:12`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup, escape

from moeverify.report.sanitize import clean

_LINE = re.compile(r"([\w./+-]+\.py):(\d+)")
_PACKAGES = Path(__file__).resolve().parents[2]


def link_lines(text: str, case_file: str) -> Markup:
    """Return a text as HTML in which every `file:line` of an existing file is a link to `vscode://`.

    Files are looked for below the current folder, the folders of the case, and the import path. A link shows
    the shortest path of the file below one of these folders.
    """
    folders = (Path.cwd(), *Path(case_file).absolute().parents[:-1], _PACKAGES, *map(Path, sys.path))
    parts, end = [], 0
    text = clean(text)
    for found in _LINE.finditer(text):
        path = _find(found[1], folders)
        if path is not None:
            shown = f"{_shorten(path, folders)}:{found[2]}"
            link = f'<a href="vscode://file{quote(str(path))}:{found[2]}">{escape(shown)}</a>'
            parts += [escape(text[end : found.start()]), Markup(link)]
            end = found.end()
    return Markup("").join([*parts, escape(text[end:])])


@lru_cache(maxsize=1024)
def _find(name: str, folders: Sequence[Path]) -> Path | None:
    """Return the first existing file of that name below the folders; an absolute name is its own path."""
    for folder in folders:
        try:
            if (path := folder / name).is_file():
                return path.resolve()
        except (OSError, ValueError):  # a name that is too long, or a folder that may not be read
            continue
    return None


def _shorten(path: Path, folders: Sequence[Path]) -> str:
    """Return the shortest path of a file below one of the folders, or its absolute path."""
    inside = [path.relative_to(each) for each in folders if each.is_absolute() and path.is_relative_to(each)]
    return min(map(str, inside or [path]), key=len)
