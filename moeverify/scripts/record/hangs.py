"""Reports about the ranks of a running script: who waits where while it hangs, and when it ends. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moeverify.report.words.failure import describe_standing, describe_watched_end
from moeverify.results.record import Record
from moeverify.verification.launch.clock import ProcessTree
from moeverify.verification.launch.watched import WatchedRanks

VARIABLE = "MOEVERIFY_RANKS"
"""The environment variable with the folder in which the ranks of a script leave their files."""


class HangSettings(Record):
    """The time in seconds after which a collective is reported, and whether this ends the script."""

    limit: float = 60.0
    stops: bool = False


class HangReporter:
    """The ranks of one script. `show` gets the lines of a report.

    `has_hung` states that a collective was reported.
    """

    def __init__(self, folder: Path, settings: HangSettings, show: Callable[[Sequence[str]], None]) -> None:
        self.has_hung = False
        self._folder = folder
        self._settings = settings
        self._show = show
        self._ranks = WatchedRanks(folder, settings.limit)

    @property
    def variables(self) -> Mapping[str, str]:
        """Return the environment variables of the script."""
        return {VARIABLE: str(self._folder)}

    @property
    def processes(self) -> ProcessTree:
        """Return the processes of the script. Their root is set when the script has started."""
        return self._ranks.processes

    @property
    def has_ended_script(self) -> bool:
        """Return whether a hang ends the script, and there was one."""
        return self.has_hung and self._settings.stops

    def look(self) -> bool:
        """Report a rank that stands in a collective. Return whether the script has to end."""
        failure = self._ranks.look()
        if failure is not None:
            self.has_hung = True
            self._show(describe_standing(failure))
        return self.has_ended_script

    def end(self, code: int) -> None:
        """Report where the ranks were when the script ended with a code other than 0."""
        failure = self._ranks.end() if code and not self.has_ended_script else None
        if failure is not None:
            self._show(describe_watched_end(failure, code))
