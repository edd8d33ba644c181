"""Self-contained HTML pages: no external fonts, images or scripts. Each page has its own template.

A text that names a line of source as `model.py:12` gets a link that opens the line in an editor.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from moeverify.report.failure import FIRST_FACTS, describe_failure, name_failure
from moeverify.report.finding_rows import describe_finding, name_finding, name_tensor
from moeverify.report.matrix import describe_cell
from moeverify.report.numbers import (
    excess,
    format_bound,
    format_count,
    format_number,
    format_range,
    format_ranks,
    format_seconds,
)
from moeverify.report.pictures.theme import format_variables
from moeverify.report.sanitize import clean
from moeverify.report.words.run import list_notes

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


_TEMPLATES = Path(__file__).parent / "templates"


def render_page(
    template: str,
    environment: Mapping[str, object],
    *,
    script: str = "page",
    version: str = "",
    **content: object,
) -> str:
    """Render a template as an HTML page with the shared style.

    `script` names the page's script and style sheet. The page contains the script's hash, so that a browser
    runs no other script, such as one injected by the name of a case. A page with a `version` asks its server
    for newer ones.
    """
    scripts = (script, "live") if version else (script,)
    code = "".join((_TEMPLATES / f"{each}.js").read_text(encoding="ascii") for each in scripts)
    styles = dict.fromkeys(("page", script))
    style = "".join((_TEMPLATES / f"{each}.css").read_text(encoding="ascii") for each in styles)
    return (
        _make_environment()
        .get_template(template)
        .render(
            environment=environment,
            version=version,
            script=Markup(code),
            script_hash=base64.b64encode(hashlib.sha256(code.encode()).digest()).decode(),
            style=Markup(style),
            variables=Markup(format_variables()),
            **content,
        )
    )


def _make_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_clean_value,
    )
    environment.filters.update(
        number=format_number,
        bound=format_bound,
        seconds=format_seconds,
        ranks=format_ranks,
        range=format_range,
        share=_format_share,
        lines=link_lines,
    )
    environment.globals.update(
        count=format_count,
        name_finding=name_finding,
        name_tensor=name_tensor,
        describe_finding=describe_finding,
        describe_cell=describe_cell,
        FIRST_FACTS=FIRST_FACTS,
        name_failure=name_failure,
        describe_failure=describe_failure,
        list_notes=list_notes,
    )
    return environment


def _format_share(error: float, bound: float) -> str:
    """Return error / bound as text."""
    return format_number(excess(error, bound))


def _clean_value(value: object) -> object:
    """Return strings without control characters; escaping happens later."""
    return clean(value) if type(value) is str else value
