"""The files that a command was asked to write: checked before the work, written after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moeverify.results.run import RunResult

Write = Callable[["RunResult", Path], None]


@dataclass(frozen=True)
class Outputs:
    """Where a run is to be written; None for what was not asked for."""

    json: Path | None = None
    junit: Path | None = None
    html: Path | None = None
    folder: Path | None = None

    def check(self) -> None:
        """Make sure that all can be written, and make their folders.

        Raises: CaseError with every path that cannot be written.
        """
        from moeverify.report.files import check_writable

        check_writable((path for path in (self.json, self.junit, self.html) if path is not None), self.folder)

    def write(self, run: RunResult) -> list[str]:
        """Write everything that was asked for and return what could not be written, with the reason."""
        failures = []
        for path, write in self._list_writers():
            try:
                write(run, path)
            except OSError as error:
                failures.append(f"{path} was not written: {error.strerror or error}")
        return failures

    def _list_writers(self) -> Iterator[tuple[Path, Write]]:
        """Yield each path with the function that writes its format."""
        from moeverify.report.formats.json import RUN_FILE, write_run
        from moeverify.report.formats.junit import write_junit

        if self.folder is not None:
            yield self.folder / RUN_FILE, write_run
        if self.json is not None:
            yield self.json, write_run
        if self.junit is not None:
            yield self.junit, write_junit
        if self.html is not None:
            from moeverify.report.formats.html import write_page

            yield self.html, write_page
