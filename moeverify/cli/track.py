"""`--track`: figures of a run for a service that draws them over commits."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeverify.cli.options import OptionGroup
from moeverify.report.trackers.registry import Tracker

if TYPE_CHECKING:
    from moeverify.cli.context import CommandContext
    from moeverify.report.trackers.figures import Commit, Figures


@dataclass(frozen=True)
class Tracking(OptionGroup):
    """Which services get the figures, and where they write."""

    track: Annotated[
        list[Tracker] | None,
        typer.Option(
            "--track", help="Write errors over bounds, verdicts and times by commit, offline; repeatable."
        ),
    ] = None
    track_dir: Annotated[
        Path, typer.Option("--track-dir", metavar="DIR", help="Where the services of --track write.")
    ] = Path("moeverify-tracking")

    def check(self) -> None:
        """Make sure, before the work, that all services are installed and can write.

        Raises: MachineError where a package is missing; CaseError where the folder cannot be written.
        """
        from moeverify.report.files import check_writable
        from moeverify.report.trackers.registry import check_tracker

        for tracker in self.track or ():
            check_tracker(tracker)
        if self.track:
            check_writable([], self.track_dir)

    def write(self, figures: Figures, context: CommandContext) -> bool:
        """Give the figures to all services and return whether all took them; the verdict does not depend on it."""
        from moeverify.report.trackers.registry import log_figures

        if not self.track or not context.is_first:
            return True
        commit, is_written = find_commit(), True
        for tracker in self.track:
            try:
                log_figures(tracker, figures, commit, self.track_dir / tracker.value)
            except Exception as error:  # whatever a service raises
                text = f"error: --track {tracker} wrote nothing: {type(error).__name__}: {error}"
                context.err.print(text, soft_wrap=True)
                is_written = False
        return is_written


def find_commit(folder: Path | None = None) -> Commit:
    """Return the commit of a folder, by default the current one; outside of git one numbered by time."""
    from moeverify.report.trackers.figures import Commit

    def ask(*words: str) -> str:
        try:
            done = subprocess.run(
                ["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.strip()

    name, seconds = ask("rev-parse", "HEAD"), ask("show", "-s", "--format=%ct", "HEAD")
    number = ask("rev-list", "--count", "HEAD")
    if not (name and seconds and number):
        return Commit(name="", number=int(time.time()), time=time.time())
    return Commit(name=name, number=int(number), time=float(seconds))
