"""`--track`: writes figures of a run for a tracking service, by commit."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeverify.cli.options import OptionGroup
from moeverify.report.trackers import Tracker

if TYPE_CHECKING:
    from moeverify.cli.context import CommandContext
    from moeverify.report.figures import Figures, TrackedCommit


@dataclass(frozen=True)
class Tracking(OptionGroup):
    """The services that receive the figures, and the folder they write to."""

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
        """Check, before the work, that all services are installed and can write.

        Raises: MachineError if a package is missing; CaseError if the folder cannot be written.
        """
        from moeverify.report.files import check_writable
        from moeverify.report.trackers import check_tracker

        for tracker in self.track or ():
            check_tracker(tracker)
        if self.track:
            check_writable([], self.track_dir)

    def write(self, figures: Figures, context: CommandContext) -> bool:
        """Log the figures to all services, and return whether all succeeded; the verdict is unaffected."""
        from moeverify.report.trackers import log_figures

        if not self.track or not context.is_first:
            return True
        commit, is_written = find_commit(), True
        for tracker in self.track:
            try:
                log_figures(tracker, figures, commit, self.track_dir / tracker.value)
            except Exception as error:  # services may raise anything
                context.fail(f"--track {tracker} wrote nothing: {type(error).__name__}: {error}")
                is_written = False
        return is_written


def find_commit(folder: Path | None = None) -> TrackedCommit:
    """Return the checked-out commit of a folder (default: the current one).

    Outside of git its name is empty and its number is the current time in seconds.
    """
    from moeverify.report.figures import TrackedCommit

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
        return TrackedCommit(name="", number=int(time.time()), time=time.time())
    return TrackedCommit(name=name, number=int(number), time=float(seconds))
