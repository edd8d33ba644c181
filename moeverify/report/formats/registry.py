"""Registry of the formats of a run. A format is a line here and a module of its name with `write`.

Modules are imported only when something is written, since every command lists the formats as options.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from moeverify.results.run import RunResult


class Format(NamedTuple):
    """A format: the name of its option and module, its help text, and whether it fills a folder."""

    name: str
    help: str
    is_folder: bool = False


FORMATS = (
    Format("json", "Write all results for machines."),
    Format("junit", "Write JUnit XML for a CI server."),
    Format("html", "Write one HTML page."),
    Format("plots", "Write the pictures as PNG files.", is_folder=True),
    Format("markdown", "Write a summary in Markdown."),
    Format("csv", "Write a table with a row for each check of each case."),
    Format("perfetto", "Write the collectives of failed cases by rank, for ui.perfetto.dev."),
    Format("trace", "Write the load of the experts of one case, for `moeverify place`."),
)


def write_run(name: str, run: RunResult, path: Path) -> None:
    """Write a run in the format of this name, atomically.

    Raises: OSError when writing fails.
    """
    import_module(f"moeverify.report.formats.{name}").write(run, path)
