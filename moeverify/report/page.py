"""Self-contained HTML pages: no external fonts, images or scripts. Each page has its own template."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from moeverify.report.editor_links import link_lines
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

_TEMPLATES = Path(__file__).parent / "templates"


def render_page(
    template: str, environment: Mapping[str, object], *, script: str = "page", **content: object
) -> str:
    """Render a template as an HTML page with the shared style.

    `script` names the page's script and style sheet. The page contains the script's hash, so that a browser
    runs no other script, such as one injected by the name of a case.
    """
    code = (_TEMPLATES / f"{script}.js").read_text(encoding="ascii")
    styles = dict.fromkeys(("page", script))
    style = "".join((_TEMPLATES / f"{each}.css").read_text(encoding="ascii") for each in styles)
    return (
        _make_environment()
        .get_template(template)
        .render(
            environment=environment,
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
