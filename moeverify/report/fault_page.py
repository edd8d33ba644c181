"""HTML page of the fault benchmark: rates, a picture of all fault classes, and one row per fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from moeverify.report.faults import list_marks, name_step, quote, summarize_faults
from moeverify.report.files import write_atomically
from moeverify.report.page import render_page
from moeverify.report.pictures import fault_matrix
from moeverify.report.pictures.picture import drawing, format_svg
from moeverify.results.benchmark_rows import FaultRow


def write(rows: Sequence[FaultRow], path: Path, environment: Mapping[str, str], command: str) -> None:
    """Write the page of a fault benchmark to `path` atomically.

    Raises: OSError when writing fails.
    """
    with drawing():
        picture = fault_matrix.draw(rows)
    page = render_page(
        "faults.html",
        environment,
        rows=rows,
        command=command,
        summary=summarize_faults(rows),
        picture=picture,
        svg=Markup(format_svg(picture, "faults")) if picture is not None else "",
        list_marks=list_marks,
        name_step=name_step,
        quote=quote,
    )
    write_atomically(path, page)
